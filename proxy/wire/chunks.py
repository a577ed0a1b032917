"""The chunked transfer coding, as far as a token needs it: a read that is one chunk, as engines send each token.

Whatever else comes is the affair of a whole parser. What is read here is written as ``chunk`` writes it, to the byte:
so it may also pass on as it is.
"""

from __future__ import annotations

_LINE_END = b"\r\n"
_LONGEST = 2048
"""Bytes; what is longer costs more than its parser."""


def chunk(data: bytes) -> bytes:
    """Return ``data``, which must not be empty, as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_HEADS = {len(chunk(bytes(size))): b"%x\r\n" % size for size in range(1, _LONGEST + 1)}
"""By the length of a whole chunk, which tells how many bytes it holds."""


def of_one_chunk(read: bytes) -> bytes | None:
    """Return what a chunk holds that is all of ``read``; ``None`` if it is anything else, or written in another way."""
    head = _HEADS.get(len(read))
    if head is None or not read.startswith(head) or not read.endswith(_LINE_END):
        return None
    return read[len(head) : -2]
