"""Token ids of prompts, and the blocks of them that a prefix cache finds.

A simulated engine has no vocabulary: of a text every four characters are a token, whose id is a hash of them, so that
texts that begin alike have ids that begin alike.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKEN_BYTES = 4 * 4
"""Of four characters in UTF-32."""
_HASH_BYTES = 16


def token_ids(text: str) -> list[int]:
    """Return the ids of a text's tokens; an empty one is one token, as if it had a mark at its beginning."""
    characters = text.encode("utf-32-le", "surrogatepass")
    return [crc32(characters[at : at + _TOKEN_BYTES]) for at in range(0, len(characters) or 1, _TOKEN_BYTES)]


def block_hashes(ids: Sequence[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
    """Return a hash for each full block of a prompt, of all that is in the prompt up to the block's end.

    Prompts of different ``salt`` have no hash in common. An id fits into 63 bits.
    """
    tokens = array("q", ids).tobytes()
    step = block_size * array("q").itemsize
    so_far = blake2b(salt.encode("utf-8", "surrogatepass") + b"\0", digest_size=_HASH_BYTES)
    hashes = []
    for end in range(step, len(tokens) + 1, step):
        so_far.update(tokens[end - step : end])
        hashes.append(so_far.copy().digest())
    return tuple(hashes)
