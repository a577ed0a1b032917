import asyncio
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_upstream import Upstream, requests_at

from loadgen.processes import ProcessError, run_in_processes, shards
from loadgen.runner import Counts

pytest_plugins = ("loadgen_fixtures",)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 5), st.randoms())
def test_every_request_is_in_one_part_with_the_one_that_it_waits_for(
    roots: list[bool], parts: int, rng: Random
) -> None:
    workload = [
        replace(request, after=None if root or not request.index else rng.randrange(request.index))
        for request, root in zip(requests_at([0.0] * len(roots)), roots, strict=True)
    ]
    found = shards(workload, parts)
    assert sorted((r for part in found for r in part), key=lambda r: r.index) == workload
    for part in found:
        inside = {r.index for r in part}
        assert all(r.after is None or r.after in inside for r in part)
        assert [r.index for r in part] == sorted(inside)
    alone = sorted(sum(r.after is None for r in part) for part in found)
    assert alone[-1] - alone[0] <= 1


class Seen:
    interval_seconds = 0.05
    last: Counts | None = None

    def show(self, counts: Counts) -> None:
        self.last = counts


async def test_two_processes_send_what_one_would(upstream: Upstream) -> None:
    first, *others = requests_at([n / 100 for n in range(10)])
    workload = [first, replace(others[0], after=0), *others[1:]]
    seen = Seen()
    results = await run_in_processes(workload, [upstream.url], processes=2, progress=seen, model="tiny", nonce=1)
    assert [r.request.index for r in results] == list(range(10))
    assert all(r.completed for r in results)
    # All count from one instant, and none of them has left before its time.
    assert all(r.sent_at is not None and r.sent_at >= r.request.at_seconds for r in results)
    assert len({tuple(body["prompt"]) for body in upstream.bodies}) == 10
    assert seen.last is not None
    assert (seen.last.total, seen.last.sent, seen.last.completed, len(seen.last.ttfts)) == (10, 10, 10, 10)


async def test_a_stop_reaches_every_process(upstream: Upstream) -> None:
    stop = asyncio.Event()
    workload = requests_at([0.0, 0.0, 1e6, 1e6])

    class Stopper(Seen):
        def show(self, counts: Counts) -> None:
            if counts.completed == 2:
                stop.set()

    results = await run_in_processes(workload, [upstream.url], processes=2, progress=Stopper(), stop=stop, model="tiny")
    assert [(r.request.index, r.completed) for r in results] == [(0, True), (1, True)]


async def test_the_end_of_a_process_is_told(upstream: Upstream) -> None:
    with pytest.raises(ProcessError):
        await run_in_processes(requests_at([0.0]), [upstream.url], processes=1, model="tiny", wrong="argument")
