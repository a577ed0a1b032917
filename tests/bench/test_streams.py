"""What the measurement of very many streams makes of what it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from bench.stampload import StampedLoad, _Client
from bench.streams import _lag, _of_bins, measure

if TYPE_CHECKING:
    import asyncio

_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
_TWO = b'x\r\n{"content":" @%019d"}\r\n' % 1 + b'x\r\n{"content":" @%019d"}\r\n' % 2
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def _read(*parts: bytes, asked: int = 2) -> StampedLoad:
    load = StampedLoad(["http://127.0.0.1"], 1, asked)
    client = _Client(load)
    client.connection_made(cast("asyncio.Transport", None))
    for part in parts:
        client.data_received(part)
    return load


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_tokens_and_the_end_are_seen_however_they_are_cut(size: int) -> None:
    whole = _HEAD + _TWO + _END
    load = await _read(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert (load.tokens, load.begun, load.over, load.errors) == (2, 1, 1, 0)


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n",),
        (_HEAD + _TWO, b"0\r\n\r\n"),
        (_HEAD + b" @%019d" % 2 + b" @%019d" % 1 + _END,),
        (_HEAD + _TWO + _TWO + _END,),
    ],
    ids=["refused", "no end", "another order", "more than was asked for"],
)
async def test_what_is_no_whole_answer_is_an_error(parts: tuple[bytes, ...]) -> None:
    load = await _read(*parts)
    assert (load.over, load.errors) == (0, 1)


def test_lag_is_of_the_time_between_two_scrapes_and_of_all_workers() -> None:
    def told(fast: int, slow: int) -> str:
        buckets = (
            (0, "0.001", fast),
            (0, "0.01", fast),
            (0, "+Inf", fast),
            (1, "0.001", 0),
            (1, "0.01", slow),
            (1, "+Inf", slow),
        )
        return "# TYPE slai_loop_lag_seconds histogram\n" + "".join(
            f'slai_loop_lag_seconds_bucket{{worker="{worker}",le="{edge}"}} {count}\n'
            for worker, edge, count in buckets
        )

    assert _lag(told(1000, 0), told(1090, 10), (0.5, 0.95)) == pytest.approx({0.5: 0.001 * 50 / 90, 0.95: 0.0055})
    assert _lag("", "", (0.5,)) == {}


def test_a_quantile_is_the_upper_edge_of_its_bin() -> None:
    assert [_of_bins([1, 0, 99], q) for q in (0.01, 0.5, 1.0)] == pytest.approx([1e-5, 3e-5, 3e-5])


@pytest.mark.e2e
async def test_streams_through_the_proxy_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "tests")  # of the processes that it starts
    found = await measure(20, 20, 0.5, workers=1)
    assert (found.errors, found.why) == (0, "")
    assert found.tokens > 0
    assert found.lag
    assert set(found.cpu) == {"upstream", "proxy", "client"}
