"""The findings of a search on disk, line by line as they come, so that an interrupted search goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.sim.search import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.sim.search import Trial

_VERSION = 1


class StateError(ValueError):
    """The file cannot be used; the message says why, and what to do."""


class StateFile:
    """A file of findings; it belongs to what was measured and how, its ``identity``.

    Raises:
        StateError: it is there and is of another search, or no state file, or cannot be written.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self.findings: dict[Trial, Finding] = {}
        """What it held when it was opened."""
        head = json.dumps({"capacity_search": _VERSION, **identity}, sort_keys=True)
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n") if self._path.exists() else []
            if not lines or lines == [""]:
                self._path.write_text(head + "\n", encoding="utf-8")
                return
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(f"--state: cannot use {self._path}: {error}") from error
        self._check(lines[0], head)
        for number, line in enumerate(lines[1:], 2):
            if not line:
                continue
            try:
                finding = msgspec.json.decode(line, type=Finding)
            except msgspec.MsgspecError as error:
                if number == len(lines):  # the last one, cut short when the machine went down
                    self._path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
                    continue
                raise StateError(f"--state: {self._path}, line {number}: {error}") from error
            self.findings[finding.trial] = finding

    def add(self, finding: Finding) -> None:
        """Append a finding; it is on disk when this returns."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(finding) + b"\n")

    def _check(self, found: str, wanted: str) -> None:
        try:
            before = json.loads(found)
        except ValueError:
            before = None
        if not isinstance(before, dict) or "capacity_search" not in before:
            raise StateError(f"--state: {self._path} is there and is no state of a search; name another file")
        now = json.loads(wanted)
        if differing := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            told = ", ".join(f"{key} ({_short(before.get(key))} then, {_short(now.get(key))} now)" for key in differing)
            raise StateError(
                f"--state: {self._path} is of another search: {told}. Give the same, or another file to begin anew"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
