"""Token ids of prompts, and the blocks of them that a prefix cache finds.

A simulated engine has no vocabulary: of a text every four characters are a token, whose id is a hash of them, so that
texts that begin alike have ids that begin alike.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

CHARACTERS_PER_TOKEN = 4
_ID_BITS = 31
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], dtype=np.uint64)  # large, odd, unlike each other
_HASH_BYTES = 16


def token_ids(text: str) -> list[int]:
    """Return the ids of a text's tokens; an empty one is one token, as if it had a mark at its beginning."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    padded = np.zeros(max(1, -(-len(characters) // CHARACTERS_PER_TOKEN)) * CHARACTERS_PER_TOKEN, dtype=np.uint64)
    padded[: len(characters)] = characters
    mixed = (padded.reshape(-1, CHARACTERS_PER_TOKEN) * _FACTORS).sum(axis=1)
    ids: list[int] = (mixed % np.uint64((1 << _ID_BITS) - 1)).tolist()
    return ids


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
