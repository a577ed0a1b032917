"""Coverage-guided fuzzing of one target; needs atheris (``pip install --group fuzz``)."""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser("python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=("sse", "body", "headers", "answer"))
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: 60)")
    parser.add_argument("--most-bytes", type=int, default=512, help="longest input (default: 512)")
    parser.add_argument("--corpus", type=Path, help="folder of inputs to begin with, and for new ones")
    parser.add_argument("--once", type=Path, help="run this one input, as a crash has left it, and end")
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("this needs atheris: .venv/bin/pip install --group fuzz")
    with atheris.instrument_imports(include=["proxy", "fuzz"]):
        from fuzz.targets import SEEDS, TARGETS
    run = TARGETS[options.target]
    if options.once:
        run(options.once.read_bytes())
        return
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[options.target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = [
        f"-max_total_time={options.seconds}",
        f"-max_len={options.most_bytes}",
        "-print_final_stats=1",
        "-timeout=10",
        f"-artifact_prefix={corpus}/",
    ]
    print(f"{options.target}: {options.seconds} s, corpus in {corpus}", file=sys.stderr)
    atheris.Setup([sys.argv[0], *limits, str(corpus)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
