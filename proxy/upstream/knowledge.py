"""What was learnt about engines, kept over restarts: one file of step models and delays, by what tells engines apart.

Not by address: behind one URL there may be another model tomorrow. Losing the file costs some hundred steps of
learning, so whatever is wrong with it is a warning and no more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import log2
from tempfile import TemporaryFile
from threading import Lock
from typing import TYPE_CHECKING, Any

from proxy.core.codec import CodecError, decode, encode
from proxy.core.feedback import DelaySnapshot
from proxy.core.stepmodel import StepModelSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from proxy.core.engine import EngineBelief
    from proxy.core.limits import EngineLimits

_log = logging.getLogger(__name__)

FILE_NAME = "step-models.json"
_FORMAT = "slai-proxy step models"
_VERSION = 1
_MOST_ENGINES = 64
_MOST_BYTES = 1 << 20
_LONGEST_VERSION = 64
_KEEP_SECONDS = 60.0
_KV_SHARE = 4
"""Sizes of KV caches are told apart by quarters of an octave: an engine finds a little more or less at each start."""


def fingerprint(models: Iterable[str], limits: EngineLimits, version: str) -> str:
    """Return what tells an engine from others, as far as it can be seen from outside, as a short text."""
    kv_size = None if limits.kv_tokens is None else round(_KV_SHARE * log2(limits.kv_tokens))
    seen = [sorted(models), kv_size, limits.block_tokens, limits.token_budget, version[:_LONGEST_VERSION]]
    return sha256(json.dumps(seen).encode()).hexdigest()[:32]


class StateDirError(Exception):
    """The directory for what is learnt cannot be used; the message names it and says why."""


def prepare(directory: Path) -> None:
    """Make ``directory`` if it is not there, and see whether files can be written in it.

    Raises:
        StateDirError: it cannot be made, is no directory, or is not writable.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise StateDirError(f"--state-dir {directory}: not a directory") from None
    except OSError as error:
        raise StateDirError(f"--state-dir {directory}: {error.strerror}") from None


@dataclass(slots=True)
class Knowledge:
    """Step models and delays by fingerprint, those used least lately first, and the file that keeps them."""

    path: Path
    _models: dict[str, dict[str, Any]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    """How many each engine's model had seen when it was last taken over."""
    _unreadable: bool = False
    _writing: Lock = field(default_factory=Lock)
    """A write goes on in its thread when nobody waits for it any more."""

    @classmethod
    def load(cls, directory: Path) -> Knowledge:
        """Read what an earlier run has left in ``directory``; nothing, with a warning, where that makes no sense."""
        found = cls(directory / FILE_NAME)
        try:
            found._models = _read(found.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s is left aside, step models are learnt anew: %s", found.path, error)
            found._unreadable = True
        return found

    def recall(self, key: str) -> StepModelSnapshot | None:
        """Return what is known about engines with this fingerprint."""
        entry = self._models.pop(key, None)
        if entry is None:
            return None
        self._models[key] = entry
        learnt = _part(entry, "model")
        return learnt if isinstance(learnt, StepModelSnapshot) else None

    def recall_delay(self, key: str) -> DelaySnapshot | None:
        """Return what is known about the way to engines with this fingerprint and back."""
        learnt = _part(self._models.get(key, {}), "delay")
        return learnt if isinstance(learnt, DelaySnapshot) else None

    def learn(self, engines: Iterable[tuple[str, EngineBelief]]) -> bool:
        """Take over what the models of ``engines``, each with its fingerprint, have learnt; whether anything is new."""
        new = False
        for key, engine in sorted(engines, key=lambda e: e[1].model.steps):  # of equal ones the last has seen most
            model = engine.model
            if not model.trusted or model.steps == self._steps.get(engine.id, 0):
                continue
            self._steps[engine.id], new = model.steps, True
            self._models.pop(key, None)
            seen = {"models": sorted(engine.models)[:20], "limits": encode(engine.limits)}
            learnt = {"model": encode(model.snapshot()), "delay": encode(engine.delay.snapshot())}
            self._models[key] = {"engine": seen, "unix_seconds": round(time.time()), **learnt}
        for key in list(self._models)[:-_MOST_ENGINES]:
            del self._models[key]
        return new

    async def run(self, engines: Callable[[], Iterable[tuple[str, EngineBelief]]]) -> None:
        """Keep what ``engines`` have taught until now, again and again, until cancelled."""
        while True:
            await asyncio.sleep(_KEEP_SECONDS)
            await self.keep(engines())

    async def keep(self, engines: Iterable[tuple[str, EngineBelief]]) -> None:
        """Learn from ``engines``, and save it if there is anything new."""
        if self.learn(engines):
            await self.save()

    async def save(self) -> None:
        """Write the file, beside the event loop; a failure is a warning."""
        told = {"format": _FORMAT, "version": _VERSION, "engines": dict(self._models)}
        try:
            await asyncio.to_thread(self._write, told)
        except OSError as error:
            _log.warning("cannot keep what was learnt in %s: %s", self.path, error.strerror)

    def _write(self, told: dict[str, Any]) -> None:
        with self._writing:
            self._replace(json.dumps(told, indent=1).encode())

    def _replace(self, data: bytes) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._unreadable:
            with suppress(FileNotFoundError):
                self.path.replace(self.path.with_suffix(".unreadable"))
            self._unreadable = False
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def _part(entry: dict[str, Any], name: str) -> Any:
    """Return a part of what is kept of an engine; ``None`` if it is not there, or of another version's kind."""
    try:
        return decode(entry[name])
    except (CodecError, LookupError):
        return None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    told = json.loads(data)
    if not isinstance(told, dict) or told.get("format") != _FORMAT:
        raise ValueError("not a file of slai-proxy")
    if told.get("version") != _VERSION:
        raise ValueError(f"version {told.get('version')}, this program reads {_VERSION}")
    engines = told.get("engines")
    if not isinstance(engines, dict) or not all(isinstance(entry, dict) for entry in engines.values()):
        raise ValueError("damaged")
    return dict(list(engines.items())[-_MOST_ENGINES:])
