"""Letters between replicas, as bytes (MessagePack)."""

from __future__ import annotations

import msgspec

from proxy.core.fleet import Letter

VERSION = 1
"""Of what is in the letters; replicas of different versions keep to different names in the store."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Letter)


class LetterError(ValueError):
    """No letter, or none that this version knows."""


def encode_letter(letter: Letter) -> bytes:
    return _encoder.encode(letter)


def decode_letter(data: bytes) -> Letter:
    """Read a letter.

    Raises:
        LetterError: it is none.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise LetterError(f"no letter of this version: {error}") from None
