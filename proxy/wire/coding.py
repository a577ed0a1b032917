"""Request bodies that a client has compressed: they travel on as they are, but have to be looked into."""

from __future__ import annotations

import zlib

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
KNOWN = "gzip, deflate"
"""As an ``Accept-Encoding`` tells it."""
_RAW_DEFLATE = -15


class UnknownCodingError(Exception):
    """The body is compressed in a way that is not known here."""


class BrokenCodingError(Exception):
    """The body is not what its ``Content-Encoding`` says."""


class TooLongError(Exception):
    """The body is longer than is allowed, once inflated."""


def inflate(body: bytes, coding: str, most_bytes: int) -> bytes:
    """Return what is in ``body``, whose ``Content-Encoding`` is ``coding``.

    Raises:
        UnknownCodingError: neither gzip nor deflate, or several codings on top of each other.
        BrokenCodingError: it cannot be inflated, or ends too early.
        TooLongError: more than ``most_bytes`` are in it; no more than that is ever held.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return body
    bits = _WINDOW_BITS.get(name)
    if bits is None:
        raise UnknownCodingError(coding)
    # Some clients take "deflate" for the bare stream, without zlib's two bytes before it.
    if name == "deflate" and not (len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0):
        bits = _RAW_DEFLATE
    inflated = bytearray()
    rest = body
    try:
        while rest:  # gzip: several members may follow each other
            stream = zlib.decompressobj(bits)
            inflated += stream.decompress(rest, most_bytes + 1 - len(inflated))
            if len(inflated) > most_bytes:
                raise TooLongError
            if not stream.eof:
                raise BrokenCodingError
            rest = stream.unused_data
    except zlib.error as error:
        raise BrokenCodingError from error
    return bytes(inflated)
