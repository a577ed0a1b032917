"""Which engines there are, by all sources together: who is added, who is removed, and what is not believed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import run_in_virtual_time

from proxy.upstream.discovery import EMPTY_SECONDS, MOST_ENGINES, Discovery, SourceError, Urls
from proxy.upstream.sources import check_entry, is_engine, split


class Scripted:
    """A source that tells what a test says, when it says it."""

    def __init__(self, *first: str) -> None:
        self.now: Urls | SourceError = frozenset(first)
        self.asked = 0
        self._changed = asyncio.Event()

    def tell(self, *urls: str) -> None:
        self.now = frozenset(urls)
        self._changed.set()

    def fail(self, why: str = "it is on fire") -> None:
        self.now = SourceError(why)
        self._changed.set()

    async def watch(self) -> AsyncGenerator[Urls]:
        self.asked += 1
        while True:
            self._changed.clear()
            if isinstance(self.now, SourceError):
                raise self.now
            yield self.now
            await self._changed.wait()


class Stage:
    """A discovery with what it has told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.discovery = Discovery(lambda url: self.told.append(f"+{url}"), lambda url: self.told.append(f"-{url}"))

    def news(self) -> list[str]:
        told, self.told[:] = list(self.told), []
        return told


def play(main: Callable[[Stage], Coroutine[Any, Any, None]], fixed: tuple[str, ...] = (), **sources: Scripted) -> None:
    async def run() -> None:
        stage = Stage()
        stage.discovery.configure(fixed, dict(sources))
        running = asyncio.ensure_future(stage.discovery.run())
        try:
            await asyncio.sleep(0.01)
            await main(stage)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    run_in_virtual_time(run())


def test_sources_together_are_the_set() -> None:
    a, b = Scripted("1", "2"), Scripted("2", "3")

    async def main(stage: Stage) -> None:
        assert stage.news() == ["+9", "+1", "+2", "+3"]
        a.tell("1")
        await asyncio.sleep(0.01)
        assert stage.news() == [], "the other one still tells of 2"
        b.tell("3", "4")
        await asyncio.sleep(0.01)
        assert stage.news() == ["+4", "-2"]
        assert stage.discovery.engines == {"9", "1", "3", "4"}

    play(main, ("9",), a=a, b=b)


def test_a_source_that_fails_keeps_what_it_told_and_is_asked_ever_more_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Scripted("1")

    async def main(stage: Stage) -> None:
        stage.news()
        source.fail()
        await asyncio.sleep(600)
        assert stage.news() == []
        assert 20 < source.asked < 30
        assert list(stage.discovery.sources()) == [("a", False, 1)]
        source.tell("2")
        await asyncio.sleep(31)
        assert stage.news() == ["+2", "-1"]
        assert list(stage.discovery.sources()) == [("a", True, 1)]

    with caplog.at_level(logging.WARNING):
        play(main, a=source)
    assert [r.message for r in caplog.records] == ["engines of a: it is on fire; the 1 known ones are kept"]


def test_that_there_are_none_is_believed_only_after_a_while() -> None:
    source = Scripted("1")

    async def main(stage: Stage) -> None:
        stage.news()
        source.tell()
        await asyncio.sleep(EMPTY_SECONDS - 1)
        assert stage.news() == []
        source.tell("1", "2")
        await asyncio.sleep(EMPTY_SECONDS + 1)
        assert stage.news() == ["+2"], "it was a moment's whim"
        source.tell()
        await asyncio.sleep(EMPTY_SECONDS - 1)
        source.fail()
        await asyncio.sleep(EMPTY_SECONDS + 1)
        assert stage.news() == [], "who does not know does not know that there are none"
        source.tell()
        await asyncio.sleep(2 * EMPTY_SECONDS + 1)
        assert stage.news() == ["-1", "-2"]

    play(main, a=source)


def test_a_source_that_never_told_of_any_is_believed_at_once() -> None:
    async def main(stage: Stage) -> None:
        assert stage.news() == []
        assert list(stage.discovery.sources()) == [("a", True, 0)]

    play(main, a=Scripted())


def test_a_new_configuration_takes_the_place_of_the_old_one() -> None:
    a, b = Scripted("1"), Scripted("2")

    async def main(stage: Stage) -> None:
        assert stage.news() == ["+9", "+1"]
        stage.discovery.configure(("8",), {"a": Scripted("never asked"), "b": b})
        await asyncio.sleep(0.01)
        assert stage.news() == ["+8", "-9", "+2"]
        stage.discovery.configure((), {"b": b})
        assert stage.news() == ["-1", "-8"]
        a.tell("5")
        await asyncio.sleep(60)
        assert stage.news() == [], "nobody listens to it any more"

    play(main, ("9",), a=a)


def test_too_many_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stage: Stage) -> None:
        assert len(stage.news()) == MOST_ENGINES

    play(main, a=Scripted(*map(str, range(MOST_ENGINES + 50))))
    assert f"of which {MOST_ENGINES} are taken" in caplog.text


def test_the_first_look_waits_for_answers_but_not_for_ever() -> None:
    class Silent:
        async def watch(self) -> AsyncGenerator[Urls]:
            await asyncio.sleep(1e6)
            yield frozenset()

    async def run() -> None:
        stage = Stage()
        stage.discovery.configure((), {"a": Scripted("1"), "silent": Silent()})
        await stage.discovery.look_first(5.0)
        assert asyncio.get_running_loop().time() == 5.0
        assert stage.news() == ["+1"]
        assert stage.discovery.failing == {"silent": "no answer within 5 s"}

    run_in_virtual_time(run())


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.none() | st.frozensets(st.sampled_from("123")), st.sampled_from([0.01, 20, 70])
    ),
    max_size=12,
)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(STEPS)
def test_whatever_they_tell_what_is_told_on_is_consistent(
    steps: list[tuple[str, frozenset[str] | None, float]],
) -> None:
    """Nobody is added twice nor removed without having been added, and the set is never empty for a failure."""
    sources = {"a": Scripted("1"), "b": Scripted()}

    async def main(stage: Stage) -> None:
        have: set[str] = set()
        for name, urls, seconds in [("a", frozenset("1"), 0.01), *steps]:
            sources[name].fail() if urls is None else sources[name].tell(*urls)
            await asyncio.sleep(seconds)
            for news in stage.news():
                (have.add if news[0] == "+" else have.remove)(news[1:])
                assert news[0] == "-" or len(have) <= 3
            assert have == stage.discovery.engines
            known = {n: s.now for n, s in sources.items() if not isinstance(s.now, SourceError)}
            if seconds >= 70:
                assert all(url in have for told in known.values() for url in told), "who answers is heard"

    play(main, (), **sources)


@pytest.mark.parametrize(
    ("entry", "kept"),
    [
        (" http://gpu:8000/ ", "http://gpu:8000"),
        ("dns+http://vllm.internal:8000", None),
        ("file:/etc/engines.yaml", None),
        ("file:engines.yaml", None),
        ("srv+http://_vllm._tcp.example.org", None),
        ("k8s+http://vllm.models:8000", None),
        ("k8s+http://vllm:http/prefix", None),
    ],
)
def test_entries(entry: str, kept: str | None) -> None:
    assert check_entry(entry) == (kept or entry)
    fixed, sources = split([check_entry(entry)], 1.0)
    assert (fixed, list(sources)) == (([kept], []) if kept else ([], [entry]))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("gpu:8000", "is not a base URL like"),
        ("ftp://gpu", "is not a base URL like"),
        ("http://gpu:8000/v1", "without /v1"),
        ("http://me:secret@gpu", "credentials"),
        ("dns+http://vllm", "a port is missing"),
        ("dns+http://vllm:http", "a port is missing"),
        ("dns+https://vllm:8000", "no certificate holds"),
        ("dns+http://me@vllm:8000", "is no engine and no source"),
        ("dns://vllm:8000", "is no engine and no source"),
        ("srv+http://vllm:80", "tells the port itself"),
        ("file:", "names no file"),
        ("k8s+http://", "is no engine and no source"),
    ],
)
def test_entries_that_mean_nothing(entry: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_entry(entry)
    assert is_engine("http://x")
