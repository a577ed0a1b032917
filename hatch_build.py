"""Compile the scheduling core to machine code, with mypyc, into a wheel for this machine.

Only where it is asked for, as it wants a C compiler: HATCH_BUILD_HOOKS_ENABLE=1 pip install . (docs/performance.md).
The sources go into the wheel as ever; Python prefers the compiled modules that lie beside them.
"""

from __future__ import annotations

import ast
import os
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

Edit = tuple[int, int, int, str]
"""Of a line: its number, from and up to which byte of it, and what to write there."""


class CompiledCore(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put what came of it into the wheel. An editable install is left as it is, to be edited."""
        if self.target_name != "wheel" or version == "editable":
            return
        compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc")
        if not compiler.strip() or shutil.which(compiler.split()[0]) is None:
            self.app.abort(
                f"to compile the core takes a C compiler, and there is no {compiler!r} here: install one, or name it by"
                " CC; without HATCH_BUILD_HOOKS_ENABLE the same is installed without machine code"
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
        # No configuration: mypy would else read the one in the home of whoever builds.
        extensions = mypycify(
            ["--config-file=", *modules], multi_file=True, debug_level="0", target_dir="c", group_name=GROUP
        )
        setup(name=GROUP, ext_modules=extensions, script_args=["-q", "build_ext", "-b", str(out), "-t", "objects"])


def prepare(path: Path) -> bool:
    """Make a module one that mypyc takes; tell whether it is to be compiled."""
    source = path.read_text()
    tree = ast.parse(source)
    bases = [ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    if path.name == "__init__.py" or "msgspec.Struct" in bases:
        return False  # a package cannot be, and msgspec makes its own classes
    path.write_text(adapted(source, tree))
    return True


def adapted(source: str, tree: ast.Module) -> str:
    """Return a module adapted to mypyc, line for line: tracebacks tell the lines of what is compiled."""
    edits, later = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            changes, afterwards = _of_record(node)
            edits += changes
            later += afterwards
        elif isinstance(node, ast.Call):
            edits += _of_sum(node)
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for number, begin, end, text in sorted(edits, reverse=True):  # the last first: the places of the others stay
        line = lines[number - 1]
        lines[number - 1] = line[:begin] + text.encode() + line[end:]
    return b"".join(lines).decode() + "".join(later)


def _of_record(record: ast.ClassDef) -> tuple[list[Edit], list[str]]:
    """Keep a dataclass one of Python's, and the annotations of its fields, or of a named tuple's, unevaluated.

    A dataclass with slots is made anew by its decorator, which a class of C cannot be; mypyc leaves to Python what
    names a metaclass. Of such classes it evaluates the annotations, which may name what only type checkers import: they
    become strings, as ``from __future__ import annotations`` would have it, at once for those who make the class and
    once more for those who look later, as mypyc gives up on unions.
    """
    is_dataclass = any(ast.unparse(decorator).startswith("dataclass") for decorator in record.decorator_list)
    if not is_dataclass and "NamedTuple" not in map(ast.unparse, record.bases):
        return [], []
    fields = {ast.unparse(node.target): node.annotation for node in record.body if isinstance(node, ast.AnnAssign)}
    edits = []
    for note in fields.values():
        assert note.end_lineno == note.lineno, "an annotation of a field in one line"
        assert note.end_col_offset is not None
        edits.append((note.lineno, note.col_offset, note.end_col_offset, repr(ast.unparse(note))))
    if is_dataclass:
        assert not record.keywords, "a record without a metaclass"
        bases = ", ".join([*map(ast.unparse, record.bases), "metaclass=type"])
        head = record.bases[-1].end_col_offset if record.bases else None
        name_ends = record.col_offset + len(f"class {record.name}")
        edits.append((record.lineno, name_ends, name_ends if head is None else head + 1, f"({bases})"))
    notes = {name: ast.unparse(note) for name, note in fields.items()}
    return edits, [f"setattr({record.name}, '__annotations__', {notes})\n"]  # mypyc takes no plain assignment


def _of_sum(call: ast.Call) -> list[Edit]:
    """Have Python add what a generator gives: since 3.12 that is more exact than the loop that mypyc makes of it."""
    if ast.unparse(call.func) != "sum" or not isinstance(call.args[0], ast.GeneratorExp):
        return []
    terms = call.args[0]  # with its parentheses, which are the call's where it is the only argument
    assert terms.end_lineno is not None
    assert terms.end_col_offset is not None
    begin, end = ("([", "])") if len(call.args) == 1 else ("[", "]")
    return [
        (terms.lineno, terms.col_offset, terms.col_offset + 1, begin),
        (terms.end_lineno, terms.end_col_offset - 1, terms.end_col_offset, end),
    ]
