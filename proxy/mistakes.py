"""What is told of settings that are not usable: the key, where it was set, and what is right."""

from __future__ import annotations

from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pydantic import ValidationError

_EXAMPLES = {
    "classes": ("fast", '{"tbt_seconds": 0.1}'),
    "tenants": ("acme", '{"weight": 3}'),
    "keys": ("acme-1", '{"sha256": "...", "tenant": "acme"}'),
}


def example(key: str) -> str:
    """Return a value of a setting that is a table, as JSON."""
    name, entry = _EXAMPLES[key]
    return f'{{"{name}": {entry}}}'


def explain(
    error: ValidationError,
    sources: Mapping[str, str],
    line_of: Callable[[tuple[str, ...]], int | None] = lambda _: None,
    known: Iterable[str] = (),
    entries: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> str:
    """Return a line for every mistake.

    ``sources`` tells where each key was set, ``line_of`` in which line of a file, and ``known`` which settings there
    are, ``entries`` which ones each entry of a table has, by the table's name.
    """
    lines = []
    for problem in error.errors(include_url=False):
        path = tuple(str(part) for part in problem["loc"] if part != "[key]")
        if not path:  # about several settings, which the message names
            lines.append(_message(problem))
            continue
        where = sources.get(path[0], "")
        if where.startswith("file ") and (line := line_of(path)) is not None:
            where += f", line {line}"
        # Of a table's entry (classes.NAME.setting) the names are those that the table's entries have.
        names = known if len(path) == 1 else entries.get(path[0], ())
        hint = suggestion(path[-1], names) if problem["type"] == "extra_forbidden" else ""
        lines.append(f"{'.'.join(path)}{f' ({where})' if where else ''}: {_message(problem)}{hint}")
    return "\n".join(lines)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a question after the name that was meant, if one of ``known`` is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def explain_yaml(error: yaml.YAMLError | ValueError) -> str:
    """Return what is wrong with a file and where, without the parser's own name for it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"position {error.position}: {error.reason}"
    return str(error)


def _message(problem: Any) -> str:
    key = problem["loc"][0] if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return "no such setting"
    if problem["type"] == "missing":
        return "has to be given"
    if key in _EXAMPLES and problem["type"] == "dict_type":
        return f"give {example(key)}"
    if key in _EXAMPLES and problem["type"] == "model_type":
        weight = key == "tenants" and type(problem["input"]) in (int, float)
        return f'give {{"weight": {problem["input"]}}}' if weight else f"give {_EXAMPLES[key][1]}"
    hint = " (tiles is the flag --tiles)" if key == "policy" and problem["input"] == "tiles" else ""
    return str(problem["msg"]).removeprefix("Value error, ") + hint
