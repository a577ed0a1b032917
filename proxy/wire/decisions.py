"""Lines of a decision log: all that the scheduler was told and what it answered, one JSON value a line.

The first line is the head: format, version, the whole configuration of the scheduler, the run and the number of the
part. After it ``[now, request_id, chunks]`` is a read with tokens that led to nothing, and ``{"t": now, "event": ...,
"actions": [...]}`` is anything else (``event`` is ``null`` for a tick). Requests go by the proxy's own numbers; there
is no text of a prompt, no header and no key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from proxy import __version__
from proxy.core.actions import Action
from proxy.core.codec import CodecError, decode, encode
from proxy.core.config import SchedulerConfig
from proxy.core.events import Event, TokensProduced

if TYPE_CHECKING:
    from proxy.core.recording import Record

FORMAT = "slai-proxy decision log"
VERSION = 1

_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class DecisionLineError(ValueError):
    """A line makes no sense, or none to this version; the message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a part."""

    config: SchedulerConfig
    run: str
    """The same in all parts of a log and in no other log."""
    part: int = 0
    unix_seconds: float | None = None
    """When the log was begun."""
    proxy: str = __version__
    """The version that wrote it."""

    def line(self) -> bytes:
        """Return it as it is written."""
        told = {"proxy": self.proxy, "run": self.run, "part": self.part, "unix_seconds": self.unix_seconds}
        return _line({"format": FORMAT, "version": VERSION} | told | {"config": encode(self.config)})


@dataclass(frozen=True, slots=True)
class Step:
    """Any other line: what happened and what was decided."""

    now: float
    event: Event | None
    """``None`` for a tick."""
    actions: list[Action]


def line_of(record: Record) -> bytes:
    """Return the line of a record."""
    now, event, rest = record
    if isinstance(event, str):
        return _line(record)
    return _line({"t": now, "event": encode(event), "actions": encode(rest)})


def is_head(line: bytes) -> bool:
    """Whether a line is the first one of a decision log, of whichever version."""
    try:
        told = msgspec.json.decode(line)
    except _BAD_JSON:
        return False
    return isinstance(told, dict) and told.get("format") == FORMAT


def read_head(line: bytes) -> Head:
    """Read the first line.

    Raises:
        DecisionLineError: it is none, or of another version.
    """
    if not is_head(line):
        raise DecisionLineError("no decision log of slai-proxy")
    told = msgspec.json.decode(line)
    if told.get("version") != VERSION:
        raise DecisionLineError(f"version {told.get('version')} of the format; this program reads {VERSION}")
    try:
        config, run, part = decode(told["config"]), told["run"], told["part"]
    except (CodecError, LookupError) as error:
        raise DecisionLineError(f"the head is damaged: {error}") from None
    if not isinstance(config, SchedulerConfig) or not isinstance(part, int) or not isinstance(run, str):
        raise DecisionLineError("the head is damaged")
    return Head(config, run, part, told.get("unix_seconds"), str(told.get("proxy")))


def read_step(line: bytes) -> Step:
    """Read any other line.

    Raises:
        DecisionLineError: it makes no sense.
    """
    now: Any
    event: Any
    actions: Any
    try:
        told = msgspec.json.decode(line)
        if isinstance(told, list):
            now, request_id, chunks = told
            event, actions = TokensProduced(request_id, chunks), ()
        else:
            now, event, actions = told["t"], decode(told["event"]), decode(told["actions"])
    except _BAD_JSON:
        raise DecisionLineError("no JSON: the log is damaged") from None
    except (CodecError, LookupError, TypeError, ValueError) as error:
        raise DecisionLineError(f"the log is damaged: {error}") from None
    well_formed = (
        isinstance(now, float | int)
        and isinstance(event, Event | None)
        and isinstance(actions, tuple)
        and all(isinstance(action, Action) for action in actions)
    )
    if not well_formed:
        raise DecisionLineError("the log is damaged: neither an event nor a tick")
    return Step(now, event, list(actions))


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"
