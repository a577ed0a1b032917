from __future__ import annotations

import gzip
import tracemalloc
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.coding import BrokenCodingError, TooLongError, UnknownCodingError, inflate

if TYPE_CHECKING:
    from collections.abc import Callable


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP ": gzip.compress,
    "deflate": zlib.compress,
}


@given(data=st.binary(max_size=5000))
def test_gives_back_what_was_compressed(data: bytes) -> None:
    for coding, pack in PACKERS.items():
        assert inflate(pack(data), coding, 5000) == data
    assert inflate(bare_deflate(data), "deflate", 5000) == data
    assert inflate(data, "identity", 0) == data


def test_members_that_follow_each_other_are_one_body() -> None:
    assert inflate(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 10) == b"ab"


@given(data=st.binary(min_size=1, max_size=200))
def test_what_is_none_is_told_and_nothing_else_is_raised(data: bytes) -> None:
    for coding in ("gzip", "deflate"):
        with suppress(BrokenCodingError):
            inflate(data, coding, 1000)


def test_what_ends_too_early_is_broken() -> None:
    with pytest.raises(BrokenCodingError):
        inflate(gzip.compress(b"hello")[:-9], "gzip", 100)


def test_the_limit_is_exact() -> None:
    assert len(inflate(gzip.compress(b"x" * 100), "gzip", 100)) == 100
    with pytest.raises(TooLongError):
        inflate(gzip.compress(b"x" * 101), "gzip", 100)
    with pytest.raises(TooLongError):
        inflate(gzip.compress(b"x" * 60) * 2, "gzip", 100)


def test_a_bomb_is_not_held_whole() -> None:
    bomb = gzip.compress(bytes(64 << 20), 1)
    tracemalloc.start()
    try:
        with pytest.raises(TooLongError):
            inflate(bomb, "gzip", 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "x"])
def test_other_codings_are_unknown(coding: str) -> None:
    with pytest.raises(UnknownCodingError):
        inflate(b"x", coding, 10)
