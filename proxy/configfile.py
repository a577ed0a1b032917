"""Configuration files: YAML read so that every mistake can be told by its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from proxy.mistakes import explain_yaml

if TYPE_CHECKING:
    from pathlib import Path

KeyPath = tuple[str, ...]


class ConfigError(Exception):
    """The settings are not usable; the message names the key, where it was set and what is right."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file holds."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """The line of every key and list entry, by the keys (and numbers) that lead to it."""

    def line(self, path: KeyPath) -> int | None:
        """The line of ``path``, or of the last key on the way to it that the file has."""
        found = (self.lines.get(path[:length]) for length in range(len(path), 0, -1))
        return next((line for line in found if line is not None), None)


def read_config_file(path: Path, holds: str = "settings") -> ConfigFile:
    """Read a mapping, of what ``holds`` says.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is no mapping, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        lines: dict[KeyPath, int] = {}
        if root is not None:
            twice = _note_lines(root, (), lines, set())
            if twice is not None:
                key, line, first = twice
                raise ConfigError(f"{path}, line {line}: {key} is there already, in line {first}")
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not, a number too long to be one
        raise ConfigError(f"{path} is not valid YAML: {explain_yaml(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    if content is None:
        return ConfigFile()
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected a mapping of {holds}, found a {type(content).__name__}")
    return ConfigFile({str(key): value for key, value in content.items()}, lines)


def _note_lines(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], seen: set[int]
) -> tuple[str, int, int] | None:
    """Note the lines of all keys below ``node``; return a key that is there twice, with both its lines."""
    if id(node) in seen:  # an alias, which may even stand for what it is in
        return None
    seen.add(id(node))
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(number), entry, entry) for number, entry in enumerate(node.value)]
    for name, marked, value in children:
        child, line = (*path, name), marked.start_mark.line + 1
        if child in lines and name != "<<":
            return ".".join(child), line, lines[child]
        lines[child] = line
        if (twice := _note_lines(value, child, lines, seen)) is not None:
            return twice
    return None
