"""Asking an engine for the usage report of a stream on our own account, and taking just that out again.

Engines tell the tokens of a stream only where ``stream_options.include_usage`` asks for it, in one more event before
the end, whose list of choices is empty. Clients that did not ask for it may not bear that.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_FIELD = b'"stream_options":{"include_usage":true},'
_ABSENT = msgspec.Raw()
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")
_LINE_END_BYTES = b"\r\n"


class _Streamed(msgspec.Struct, gc=False):
    stream: bool | None = None
    stream_options: msgspec.Raw = _ABSENT


class _Report(msgspec.Struct, gc=False):
    choices: list[Any] | None = None
    usage: dict[str, Any] | None = None


_STREAMED = msgspec.json.Decoder(_Streamed)
_REPORT = msgspec.json.Decoder(_Report)


def ask_for_usage(body: bytes) -> bytes | None:
    """Return a generation request that asks for usage and is otherwise the same bytes.

    ``None`` where there is nothing to ask: it is not streamed, names ``stream_options`` itself (whatever they are), or
    cannot be read.
    """
    try:
        found = _STREAMED.decode(body)
        wanted = found.stream is True and not bytes(found.stream_options)
    except RecursionError:
        return None
    except msgspec.DecodeError:
        wanted = _wanted_as_the_engine(body)
    if not wanted:
        return None
    at = body.index(b"{") + 1
    return body[:at] + _FIELD + body[at:]


def _wanted_as_the_engine(body: bytes) -> bool:
    """Decide with Python's own parser what msgspec refused, as ``proxy.wire.openai`` does."""
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("stream") is True and "stream_options" not in fields


class UsageRemover:
    """Takes the usage report out of a stream of server-sent events; every other byte passes, as soon as it can.

    What is held back is an event under way, since it could be the report: as long as it is no longer than
    ``max_event_bytes``.
    """

    __slots__ = ("_held", "_max_event_bytes", "_removed_after_cr", "_too_long", "removed")

    def __init__(self, *, max_event_bytes: int = 1 << 16) -> None:
        self._max_event_bytes = max_event_bytes
        self._held = b""
        self._too_long = False
        """The event under way is too long to be the report, and has passed up to its last line ends."""
        self._removed_after_cr = False
        """What was taken out ended in a CR: an LF that follows belongs to it."""
        self.removed = 0
        """Reports taken out."""

    def feed(self, data: bytes) -> bytes:
        """Return what of the stream can be passed on, now that ``data`` has come."""
        if not self._held and b'"usage"' not in data and data.endswith(b"\n\n") and not self._removed_after_cr:
            return data  # whole events, as almost every read
        if self._removed_after_cr and data:
            self._removed_after_cr = False
            data = data.removeprefix(b"\n")
        stream = self._held + data
        passed: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(stream):
            self._removed_after_cr = False
            passed.append(self._without_report(stream[start : end.end()]))
            start = end.end()
        self._held = stream[start:]
        if self._held:
            self._removed_after_cr = False  # what follows has begun, and not with an LF
        if self._too_long or len(self._held) > self._max_event_bytes:
            self._too_long = True
            head = self._held.rstrip(_LINE_END_BYTES)
            passed.append(head)
            self._held = self._held[len(head) :]
        return b"".join(passed)

    def end(self) -> bytes:
        """Return what is still held back, at the end of the stream."""
        held, self._held = self._held, b""
        ended = held + b"\n\n"
        passed = self._without_report(ended)  # which a last event without its blank line may be
        return held if passed == ended else passed

    def _without_report(self, event: bytes) -> bytes:
        if self._too_long:
            self._too_long = False
            return event
        if b'"usage"' not in event:
            return event
        # Line ends before it belong to the event before: the LF of a CR that was its last byte, or more blank lines.
        body = event.lstrip(_LINE_END_BYTES)
        before = event[: len(event) - len(body)]
        lines = _LINE.findall(body)
        values = [line[5:].removeprefix(b" ") for line, _ in lines if line.startswith(b"data:")]
        if not _is_report(b"\n".join(values)):
            return event
        self.removed += 1
        self._removed_after_cr = event.endswith(b"\r")
        rest = [(line, end) for line, end in lines if not line.startswith(b"data:") and line != b"data"]
        # Comments and other fields of the same event stay, and its blank line with them.
        return before + (b"".join(line + end for line, end in rest) if any(line for line, _ in rest) else b"")


def _is_report(payload: bytes) -> bool:
    try:
        found = _REPORT.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return False
    return found.choices == [] and found.usage is not None
