"""Texts of prompts: token ids of exactly the length asked for, unique unless they are to be shared.

Every text is cut from a stream of ids that has a name; the same name is the same stream in any process, and two names
have nothing in common. A nonce, drawn for each run, goes into all names, so that nothing is found in a server's prefix
cache that an earlier run has left there.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from proxy.sim.workload import ScheduledRequest

FIRST_ID, IDS = 1000, 2048
"""Plain words in any vocabulary: beyond the special tokens that come first, and small enough for test models.

A power of two, so that random bits are ids of equal probability; of four digits each, so that the JSON text of any of
them is as long as of any other, and that of a prompt is made without making its numbers.
"""

_JSON_IDS = np.frombuffer(b"".join(b"%d," % n for n in range(FIRST_ID, FIRST_ID + IDS)), dtype=np.uint8).reshape(IDS, 5)

Ids = np.ndarray[Any, np.dtype[np.uint16]]
"""Token ids, less ``FIRST_ID``."""


def prompt_ids(request: ScheduledRequest, nonce: int) -> Ids:
    """Return the ids of a request's prompt, less ``FIRST_ID``: shared blocks or a shared prefix, then its own."""
    wanted = request.prompt_tokens
    parts: list[Ids] = []
    if request.blocks:
        parts = [_block(f"{nonce}:block:{name}", request.block_tokens) for name in request.blocks]
    elif request.prefix:
        parts = [_block(f"{nonce}:prefix:{request.prefix}", request.prefix_tokens)]
    known = sum(map(len, parts))
    if known < wanted:
        parts.append(_stream(f"{nonce}:{request.content_seed}", wanted - known))
    return parts[0][:wanted] if len(parts) == 1 else np.concatenate(parts)[:wanted]


def as_json(ids: Ids) -> bytes:
    """Return the JSON array of token ids."""
    return b"[%b]" % _JSON_IDS[ids].tobytes()[:-1]


def as_numbers(ids: Ids) -> list[int]:
    """Return the token ids themselves."""
    found: list[int] = (ids.astype(int) + FIRST_ID).tolist()
    return found


@lru_cache(maxsize=4096)
def _block(name: str, length: int) -> Ids:
    return _stream(name, length)


def _stream(name: str, length: int) -> Ids:
    # An extendable-output function: a longer text of one name begins with the shorter one.
    bits = np.frombuffer(shake_128(name.encode()).digest(2 * length), dtype="<u2")
    return (bits & np.uint16(IDS - 1)).astype(np.uint16, copy=False)
