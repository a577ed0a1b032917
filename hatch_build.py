"""Compile the scheduling core to machine code, with mypyc, into a wheel for this machine.

Only where it is asked for, as it wants a C compiler: HATCH_BUILD_HOOKS_ENABLE=1 pip install . (docs/performance.md).
The sources go into the wheel as ever; Python prefers the compiled modules that lie beside them.
"""

from __future__ import annotations

import ast
import shutil
import sysconfig
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORE = Path("proxy/core")
GROUP = "slai_core"
"""All that is compiled lies in one library of this name, which the modules' own only point to."""


class CompiledCore(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put what came of it into the wheel. An editable install is left as it is, to be edited."""
        if self.target_name != "wheel" or version == "editable":
            return
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        if shutil.which(compiler) is None:
            self.app.abort(
                f"to compile the core takes a C compiler, and there is no {compiler!r} here:"
                " install one, or unset HATCH_BUILD_HOOKS_ENABLE for the same without machine code"
            )
        self.app.display_info(f"Compiling {CORE}, which takes a minute or two ...")
        self._built = TemporaryDirectory()
        built = Path(self._built.name)
        compile_core(Path(self.root), built)
        libraries = built.rglob("*" + sysconfig.get_config_var("EXT_SUFFIX"))
        build_data["force_include"] |= {str(library): str(library.relative_to(built)) for library in libraries}
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if hasattr(self, "_built"):
            self._built.cleanup()


def compile_core(root: Path, out: Path) -> None:
    """Compile what is in ``root``'s core into libraries in ``out``, laid out as to be installed."""
    from mypyc.build import mypycify  # noqa: PLC0415  # takes a second, and is not there unless asked for
    from setuptools import setup  # noqa: PLC0415

    with TemporaryDirectory() as directory, chdir(directory):
        shutil.copytree(root / CORE, CORE)
        shutil.copy(root / "proxy/__init__.py", "proxy")
        modules = [str(path) for path in sorted(CORE.rglob("*.py")) if prepare(path)]
        extensions = mypycify(modules, multi_file=True, debug_level="0", target_dir="c", group_name=GROUP)
        setup(name=GROUP, ext_modules=extensions, script_args=["-q", "build_ext", "-b", str(out), "-t", "objects"])


def prepare(path: Path) -> bool:
    """Make a module one that mypyc takes; tell whether it is to be compiled."""
    source = path.read_text()
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    if path.name == "__init__.py" or any(ast.unparse(base) == "msgspec.Struct" for c in classes for base in c.bases):
        return False  # a package cannot be, and msgspec makes its own classes
    path.write_text(adapted(source, classes))
    return True


def adapted(source: str, classes: list[ast.ClassDef]) -> str:
    """Return a module with its records adapted to mypyc, line for line: tracebacks tell the lines of what is compiled.

    A dataclass with slots is made anew by its decorator, which a class of C cannot be. So they stay classes of Python,
    as mypyc has it with any that name a metaclass. Of these it evaluates the annotations, which may name what only type
    checkers import: they become strings, as ``from __future__ import annotations`` would have it, at once for those
    who make the class and once more for those who look later, as mypyc gives up on unions.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    later = []
    for record in classes:
        is_dataclass = any(ast.unparse(decorator).startswith("dataclass") for decorator in record.decorator_list)
        if not is_dataclass and "NamedTuple" not in map(ast.unparse, record.bases):
            continue
        fields = {ast.unparse(node.target): node.annotation for node in record.body if isinstance(node, ast.AnnAssign)}
        for note in reversed(fields.values()):  # the last first: the places of the others stay
            assert note.end_lineno == note.lineno, "an annotation of a field in one line"
            line = lines[note.lineno - 1]
            quoted = repr(ast.unparse(note)).encode()
            lines[note.lineno - 1] = line[: note.col_offset] + quoted + line[note.end_col_offset :]
        if is_dataclass:
            line, bases = lines[record.lineno - 1], [*map(ast.unparse, record.bases), "metaclass=type"]
            assert line.rstrip().endswith(b":"), "the head of a class in one line"
            lines[record.lineno - 1] = f"class {record.name}({', '.join(bases)}):\n".encode()
        notes = {name: ast.unparse(note) for name, note in fields.items()}
        later.append(f"setattr({record.name}, '__annotations__', {notes})\n")  # mypyc takes no plain assignment
    return b"".join(lines).decode() + "".join(later)
