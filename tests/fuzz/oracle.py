"""The event stream format, written down once more from the HTML standard and with nothing of the proxy's.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation, on bytes and for a stream of
which all has come: the lines first, then the fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class Stream:
    """What a stream says."""

    payloads: list[bytes]
    """The data of its events."""
    at_boundary: bool
    """Whether it ends between two events."""


def parse(stream: bytes) -> Stream:
    """Read a whole stream."""
    lines = _LINE_END.split(stream.removeprefix(b"\xef\xbb\xbf"))
    unfinished = lines.pop()
    payloads: list[bytes] = []
    data: bytes | None = None
    within = False
    for line in lines:
        if line == b"":
            if data is not None:
                payloads.append(data.removesuffix(b"\n"))
            data, within = None, False
            continue
        within = True
        if line.startswith(b":"):
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data = (data or b"") + value.removeprefix(b" ") + b"\n"
    return Stream(payloads, at_boundary=not within and unfinished == b"")
