"""Spans as OTLP has them: in protocol buffers, which each is written to once, when it ends.

The exporters' own encoder makes objects of every attribute and copies them from message to message, 60 us for a span,
and the loop waits for the interpreter's lock meanwhile at each system call. This takes some 10 us, on the loop, and
sending puts together what is there.
"""

from __future__ import annotations

from functools import lru_cache
from struct import pack
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import ReadableSpan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import Event

_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
"""Flags of a span, by whether its parent is somebody else's."""


class EndedSpan(ReadableSpan):
    """A span that is written already."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.written = _span(self)


def export_request(spans: Sequence[EndedSpan]) -> bytes:
    """Put together an ``ExportTraceServiceRequest`` of spans that are all of one resource and one scope."""
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    assert scope is not None
    named = _field(b"\x0a", _text(b"\x0a", scope.name) + _text(b"\x12", scope.version or ""))
    of_scope = named + b"".join([_field(b"\x12", span.written) for span in spans])
    of_resource = _field(b"\x0a", b"".join(_attributes(b"\x0a", resource.attributes)))
    return _field(b"\x0a", of_resource + _field(b"\x12", of_scope))


def _span(span: ReadableSpan) -> bytes:
    context, parent, status = span.context, span.parent, span.status
    assert context is not None
    parts = [
        b"\x0a\x10" + context.trace_id.to_bytes(16, "big"),
        b"\x12\x08" + context.span_id.to_bytes(8, "big"),
        _text_as_before(b"\x2a", span.name),
        pack("<BBBqBq", 0x30, span.kind.value + 1, 0x39, span.start_time, 0x41, span.end_time),
        *_attributes(b"\x4a", span.attributes or {}),
        *(_field(b"\x5a", _event(event)) for event in span.events),
        _status(status.status_code.value, status.description or ""),
        b"\x85\x01" + pack("<I", _HAS_IS_REMOTE | (_IS_REMOTE if parent is not None and parent.is_remote else 0)),
    ]
    if context.trace_state:
        parts.append(_text(b"\x1a", context.trace_state.to_header()))
    if parent is not None:
        parts.append(b"\x22\x08" + parent.span_id.to_bytes(8, "big"))
    if dropped := span.dropped_attributes:
        parts.append(b"\x50" + _varint(dropped))
    if dropped := span.dropped_events:
        parts.append(b"\x60" + _varint(dropped))
    return b"".join(parts)


@lru_cache(256)
def _status(code: int, description: str) -> bytes:
    return _field(b"\x7a", _text(b"\x12", description) + b"\x18" + _varint(code))


def _event(event: Event) -> bytes:
    dropped = event.dropped_attributes
    return b"".join(
        (
            b"\x09",
            pack("<q", event.timestamp),
            _text_as_before(b"\x12", event.name),
            *_attributes(b"\x1a", event.attributes or {}),
            b"\x20" + _varint(dropped) if dropped else b"",
        )
    )


def _attributes(tag: bytes, attributes: Mapping[str, Any]) -> list[bytes]:
    # Most of them are the same for one request after the other.
    return [
        (_attribute_as_before if type(value) in _ALIKE else _attribute)(tag, name, value)
        for name, value in attributes.items()
    ]


def _attribute(tag: bytes, name: str, value: object) -> bytes:
    told = _value(value)
    return _before_value(tag, name, len(told)) + told


_ALIKE = frozenset({str, int, bool})
_attribute_as_before = lru_cache(4096, typed=True)(_attribute)


@lru_cache(4096)
def _before_value(tag: bytes, name: str, size: int) -> bytes:
    """Write what comes before a value of so many bytes."""
    before = _text(b"\x0a", name) + b"\x12" + _varint(size)
    return tag + _varint(len(before) + size) + before


def _value(value: object) -> bytes:
    match value:
        case str():
            return _text(b"\x0a", value)
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int() if -(1 << 63) <= value < 1 << 63:
            return b"\x18" + _varint(value % (1 << 64))
        case float():
            return b"\x21" + pack("<d", value)
        case tuple():
            return _field(b"\x2a", b"".join(_field(b"\x0a", _value(each)) for each in value))
        case _:  # numbers beyond 64 bits are text in OTLP
            return _text(b"\x0a", str(value))


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode(errors="replace"))


_text_as_before = lru_cache(256)(_text)


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _BYTES[value]
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_BYTES = [bytes((value,)) for value in range(0x80)]
