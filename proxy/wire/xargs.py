"""Telling an engine with our plugin the TBT deadline of a request, in the ``vllm_xargs`` of its body.

What a client says there itself stands, and every byte that came is passed on as it came.
"""

from __future__ import annotations

import json
import re

_XARGS = "vllm_xargs"
_TBT = "slai_tbt_ms"
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]', re.DOTALL)
_VALUE = re.compile(rb"\s*:\s*(\{)?")
_END = re.compile(rb"\s*\}")


def tell_tbt(body: bytes, tbt_seconds: float) -> bytes:
    """Return the body of a generation request, a JSON object, with the deadline told.

    It comes back as it is where the client tells one, or says something in its place that is no object.
    """
    told = f'"{_TBT}":{round(1000 * tbt_seconds, 3):g}'.encode()
    if _XARGS.encode() not in body:  # if it is there by another spelling, that comes later, and the last one holds
        return _put_first(body, body.index(b"{") + 1, b'"%b":{%b}' % (_XARGS.encode(), told))
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if _XARGS not in fields:
        return _put_first(body, body.index(b"{") + 1, b'"%b":{%b}' % (_XARGS.encode(), told))
    arguments = fields[_XARGS]
    opened = _last_object(body)
    if not isinstance(arguments, dict) or _TBT in arguments or opened is None:
        return body
    return _put_first(body, opened, told)


def _put_first(body: bytes, at: int, member: bytes) -> bytes:
    return b"".join((body[:at], member, b"" if _END.match(body, at) else b",", body[at:]))


def _last_object(body: bytes) -> int | None:
    """Where the members of the body's last ``vllm_xargs`` begin; ``None`` if that is no object."""
    depth = position = 0
    found: int | None = None
    while (token := _TOKEN.search(body, position)) is not None:
        position = token.end()
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and token[0] == b'"%b"' % _XARGS.encode():
            value = _VALUE.match(body, position)
            if value is not None:  # or else it is itself the value of another member
                found = value.end() if value[1] else None
    return found
