"""Models by other names: the name in a request is replaced, and not a byte beside it."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")


def rename_model(body: bytes, model: str) -> bytes:
    """Return a JSON object's bytes with ``model`` as the value of its ``model``, wherever it names one.

    What is no JSON comes back in some state, for the engine to refuse.
    """
    named = json.dumps(model).encode()
    pieces: list[bytes] = []
    depth = copied = position = 0
    while (token := _TOKEN.search(body, position)) is not None:
        position = token.end()
        mark = token[0]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
        elif depth == 1 and (colon := _COLON.match(body, position)) is not None:
            position = colon.end()
            value = _TOKEN.match(body, position)
            if _is_model(mark) and value is not None and value[0].startswith(b'"'):
                pieces += (body[copied:position], named)
                copied = position = value.end()
    return b"".join((*pieces, body[copied:]))


def _is_model(key: bytes) -> bool:
    if b"\\" not in key:
        return key == b'"model"'
    try:
        return bool(json.loads(key) == "model")
    except ValueError:
        return False
