"""Forms with files (``multipart/form-data``, RFC 7578): which model one names, as an upload of sound or pictures does.

Read as strictly as the parsers of engines (python-multipart) or more so: of a form that can be read in two ways nothing
is understood, so that what is checked here is what an engine acts on. The form itself travels on byte for byte.
"""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from email.policy import compat32
from typing import NamedTuple

_MOST_PARTS = 256
_LONGEST_HEAD = 8192
_LONGEST_VALUE = 1024
_HEADS = BytesHeaderParser(policy=compat32)


class _Span(NamedTuple):
    start: int
    end: int


def model_of_form(body: bytes, content_type: str) -> str:
    """Return the model that a form names; empty if it names none, several, or is not understood."""
    span = _find_model(body, content_type)
    return "" if span is None else body[span.start : span.end].decode(errors="backslashreplace")


def rename_model_of_form(body: bytes, content_type: str, model: str) -> bytes:
    """Return a form's bytes with another model in the place of the one that it names."""
    span = _find_model(body, content_type)
    return body if span is None else body[: span.start] + model.encode() + body[span.end :]


def _find_model(body: bytes, content_type: str) -> _Span | None:
    head = Message()
    head["Content-Type"] = content_type
    boundary = head.get_param("boundary")
    if not isinstance(boundary, str) or not 1 <= len(boundary) <= 70 or not boundary.isascii():
        return None
    delimiter = b"\r\n--" + boundary.encode()
    position, found = len(delimiter) - 2, None
    if not body.startswith(delimiter[2:]):
        return None
    for _ in range(_MOST_PARTS):
        if body.startswith(b"--", position):
            return found
        # The end of a head may be the line end after the delimiter, where there are no headers.
        start = body.find(b"\r\n\r\n", position, position + _LONGEST_HEAD)
        if not body.startswith(b"\r\n", position) or start < 0:
            return None
        end = body.find(delimiter, start + 2)
        if end < 0:
            return None
        name = _name(body[position + 2 : start + 2])
        if name is None:
            return None
        if name == "model":
            if found is not None or end - start - 4 > _LONGEST_VALUE:
                return None
            found = _Span(start + 4, end)
        position = end + len(delimiter)
    return None


def _name(head: bytes) -> str | None:
    """Return the name of a part; ``None`` where its head leaves a doubt about it."""
    told = _HEADS.parsebytes(head + b"\r\n").get_all("Content-Disposition", [])
    if len(told) != 1:
        return None
    part = Message()
    part["Content-Disposition"] = str(told[0])  # no text yet where it has bytes beyond ASCII
    name = part.get_param("name", header="Content-Disposition")
    return name if isinstance(name, str) else None  # one in the extended notation is not for forms (RFC 7578, 4.2)
