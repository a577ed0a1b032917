"""What is believed of prefix caches: which beginnings are held, and what the scheduler makes of that."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest
from builders import make_blocks, make_engine, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from playbook import Play

from proxy.core.engine import EngineBelief
from proxy.core.ordering import first_come_first_served
from proxy.core.prefix import NO_BLOCKS, Prefixes, PrefixIndex, PromptBlocks
from proxy.core.request import STRICT
from proxy.core.tiles import TileConfig

texts = st.text("ab", max_size=8)


def filled(*prompts: str, capacity: int = 100_000) -> PrefixIndex:
    index = PrefixIndex()
    index.capacity_tokens = capacity
    for number, text in enumerate(prompts):
        index.use(make_blocks(text), number)
    return index


def held(index: PrefixIndex, *prompts: str) -> list[int]:
    return [index.match(make_blocks(text)) for text in prompts]


# The index.


@given(st.lists(texts, max_size=6), texts)
def test_a_match_is_the_longest_beginning_in_common(prompts: list[str], text: str) -> None:
    longest = max((n for p in prompts for n in range(9) if len(text) >= n <= len(p) and text[:n] == p[:n]), default=0)
    assert held(filled(*prompts), text) == [longest]


def test_what_was_used_longest_ago_goes_first_and_of_a_prompt_its_end() -> None:
    index = filled("aaaa", "bbbb", capacity=800)
    assert held(index, "aaaa", "bbbb") == [4, 4]
    index.use(make_blocks("cc"), 3)
    assert held(index, "aaaa", "bbbb", "cc") == [2, 4, 2]
    index.use(make_blocks("aa"), 4)
    index.use(make_blocks("ddd"), 5)
    assert held(index, "aa", "bbbb", "cc", "ddd") == [2, 1, 2, 3]
    assert index.tokens == 800


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    assert held(filled("a" * 50, capacity=700), "a" * 50) == [7]


def test_the_number_of_blocks_is_bounded_too() -> None:
    index = PrefixIndex()
    for number in range(700):
        hashes = tuple(range(100 * number, 100 * number + 100))
        index.use(PromptBlocks(hashes, (0,) * 100), number)
    assert len(index) == 65_536


def test_taking_back_leaves_what_was_there_before_and_what_others_have_used_since() -> None:
    index = filled("aa")
    index.use(make_blocks("aabbbb"), 7)
    index.use(make_blocks("aabb"), 8)
    index.take_back(make_blocks("aabbbb"), 2, 7)
    assert held(index, "aabbbb") == [4]
    assert index.tokens == 400


class AnyUse(RuleBasedStateMachine):
    """Uses, take-backs and evictions: of each chain a beginning is held, and the sums are right."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.used: list[tuple[str, int]] = []

    @initialize(capacity=st.integers(1, 30))
    def start(self, capacity: int) -> None:
        self.index.capacity_tokens = 100 * capacity

    @rule(text=texts)
    def use(self, text: str) -> None:
        self.used.append((text, self.index.match(make_blocks(text))))
        self.index.use(make_blocks(text), len(self.used))

    @rule(pick=st.integers(0, 100))
    def take_back(self, pick: int) -> None:
        if self.used:
            number = pick % len(self.used)
            text, known = self.used[number]
            self.index.take_back(make_blocks(text), known, number + 1)

    @invariant()
    def of_each_chain_a_beginning_is_held(self) -> None:
        blocks = self.index._blocks
        assert self.index.tokens == sum(tokens for tokens, _ in blocks.values()) == 100 * len(blocks)
        assert self.index.tokens <= self.index.capacity_tokens
        reachable = set()
        for text, _ in self.used:
            hashes = make_blocks(text).hashes
            beginning = list(takewhile(blocks.__contains__, hashes))
            assert len(beginning) == self.index.match(make_blocks(text)) == sum(h in blocks for h in hashes)
            reachable |= set(beginning)
        assert reachable == blocks.keys()


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=100, stateful_step_count=30, derandomize=True, database=None, deadline=None)


# Trust.


def test_trust_falls_with_what_is_not_found_and_comes_back() -> None:
    index = PrefixIndex()
    assert index.trust == 1
    for _ in range(50):
        index.judge(1000, 0)
    assert index.trust < 0.1
    for _ in range(200):
        index.judge(1000, 5000)
    assert 0.9 < index.trust <= 1


def test_trust_follows_the_share_that_is_found() -> None:
    index = PrefixIndex()
    for number in range(400):
        index.judge(1000, 1000 if number % 4 else 0)
    assert index.trust == pytest.approx(0.75, abs=0.03)


# Several engines.


def engine(number: int = 0, **fields: Any) -> EngineBelief:
    return make_engine(f"e{number}", number=number, **{"caches_prefixes": True, **fields})


def test_what_one_engine_was_given_another_does_not_have() -> None:
    prefixes, one, other = Prefixes(), engine(0), engine(1)
    request = make_request("a", 1000, blocks=make_blocks("a" * 9))
    assert prefixes.release(request, one) == 0
    follower = make_request("b", 1000, blocks=make_blocks("aaaaabbb"))
    assert [prefixes.cached_tokens(follower, e) for e in (one, other)] == [496, 0], "whole blocks of 16"
    assert prefixes.uncached_tokens(follower, (one, other)) == 504
    assert prefixes.release(follower, one) == 496


def test_an_equal_prompt_has_its_last_token_left_to_compute() -> None:
    prefixes, one = Prefixes(), engine()
    for request_id, expected in (("a", 0), ("b", 880)):
        assert prefixes.release(make_request(request_id, 896, blocks=make_blocks("a" * 9)), one) == expected
    assert prefixes.uncached_tokens(make_request("c", 1, blocks=make_blocks("a")), [one]) == 1


def test_an_engine_without_prefix_caching_holds_nothing() -> None:
    prefixes, one = Prefixes(), engine(caches_prefixes=False)
    for request_id in ("a", "b"):
        assert prefixes.release(make_request(request_id, 1000, blocks=make_blocks("a" * 9)), one) == 0
    assert len(prefixes.index("e0")) == 0


def test_the_size_of_the_kv_cache_bounds_the_index() -> None:
    prefixes, one = Prefixes(), engine(kv_tokens=2000)
    for letter in "abcdefghij":
        prefixes.release(make_request(letter, 1000, blocks=make_blocks(letter * 9)), one)
    assert prefixes.index("e0").tokens <= 2000
    assert prefixes.cached_tokens(make_request("x", 1000, blocks=make_blocks("j" * 9)), one) == 896
    assert prefixes.cached_tokens(make_request("x", 1000, blocks=make_blocks("a" * 9)), one) == 0


def test_reports_scale_the_belief_and_only_where_there_was_one() -> None:
    prefixes, one = Prefixes(), engine()
    request = make_request("first", 1000, blocks=make_blocks("a" * 9))
    prefixes.release(request, one)
    prefixes.end("first", 0)
    assert prefixes.index("e0").trust == 1, "nothing was believed of the first"
    for number in range(100):
        prefixes.release(make_request(str(number), 1000, blocks=make_blocks("a" * 9)), one)
        prefixes.end(str(number), None if number % 2 else 300)
    assert prefixes.index("e0").trust == pytest.approx(1 / 3, abs=0.1)
    assert 200 < prefixes.cached_tokens(request, one) < 400
    assert not prefixes._uses


# The scheduler with them.


def play(engines: int = 2, **fields: Any) -> Play:
    return Play(engines=[f"e{n}" for n in range(engines)], caches_prefixes=True, **fields)


def test_a_prompt_goes_where_its_beginning_is() -> None:
    stage = play()
    assert stage.arrive("a", 400, blocks=make_blocks("aaa")) == ["dispatch a e0"]
    assert stage.arrive("b", 400, blocks=make_blocks("bbb")) == ["dispatch b e1"]
    stage.tokens("a", at=0.1)
    stage.tokens("b", at=0.1)
    assert stage.arrive("b2", 400, blocks=make_blocks("bbbc"), at=0.2) == ["dispatch b2 e1"]
    assert stage.arrive("b3", 400, blocks=make_blocks("bbbd")) == ["dispatch b3 e1"], "little work for it there"
    assert stage.engine("e1").backlog == 2 * (400 - 288)
    assert stage.engine("e1").kv_tokens == 3 * 400 + 1


def test_not_where_its_beginning_is_if_more_is_waiting_there_than_that_saves() -> None:
    stage = play()
    stage.arrive("a", 400, blocks=make_blocks("a"))
    stage.arrive("b", 300)
    assert stage.arrive("c", 400, blocks=make_blocks("a")) == ["dispatch c e1"], "96 tokens saved, 100 more waiting"


def test_an_engine_that_could_begin_it_is_not_left_idle() -> None:
    stage = play()
    stage.arrive("a", 5000, blocks=make_blocks("a" * 49))
    assert stage.arrive("b", 5000, blocks=make_blocks("a" * 49)) == ["dispatch b e1"]


def test_the_order_is_by_what_is_not_cached() -> None:
    for blocks, first in ((make_blocks("a" * 40), "long"), (NO_BLOCKS, "short")):
        stage = play(1, max_num_seqs=1)
        stage.arrive("seen", 4100, blocks=make_blocks("a" * 40))
        stage.arrive("short", 600)
        stage.arrive("long", 4100, blocks=blocks)
        assert stage.end("seen", at=1.0) == [f"dispatch {first} e0"]


def test_an_exact_length_keeps_what_is_known_of_the_cache() -> None:
    stage = play(1, max_num_seqs=1)
    stage.arrive("seen", 4100, blocks=make_blocks("a" * 40))
    stage.arrive("short", 600)
    stage.arrive("long", 9000, blocks=make_blocks("a" * 40))
    stage.tokenized("long", 4100)
    assert stage.end("seen", at=1.0) == ["dispatch long e0"]


def not_started(stage: Play) -> None:
    stage.not_started("a")
    stage.end("a")


def restarted(stage: Play) -> None:
    stage.end("a")
    stage.down("e0")
    stage.up("e0", caches_prefixes=True)


def flapped(stage: Play) -> None:
    stage.end("a")
    stage.up("e0", caches_prefixes=True, token_budget=256)


@pytest.mark.parametrize(("event", "left"), [(not_started, 0), (restarted, 0), (flapped, 3)])
def test_what_a_cache_loses(event: Callable[[Play], None], left: int) -> None:
    stage = play(1)
    stage.arrive("a", 400, blocks=make_blocks("aaa"))
    event(stage)
    assert stage.scheduler.prefixes.index("e0").match(make_blocks("aaa")) == left


def test_requests_without_blocks_are_treated_as_ever() -> None:
    with_index, without = play(ordering=first_come_first_served()), Play(engines=["e0", "e1"])
    for stage in (with_index, without):
        stage.arrive("x", 700, blocks=make_blocks("aaaaaaa"))
        stage.arrive("y", 300)
    for number in range(10):
        for stage in (with_index, without):
            stage.arrive(f"n{number}", 100 + number)
    one, other = ([(e.outstanding, e.backlog, e.kv_tokens) for e in s.scheduler.engines] for s in (with_index, without))
    assert one == other


def test_backlog_and_kv_cache_come_to_nothing_in_the_end() -> None:
    stage = play(1)
    for number, text in enumerate(["aaa", "aaab", "aaa", "aab"]):
        stage.arrive(str(number), 420, blocks=make_blocks(text))
        stage.tokens(str(number), at=number + 1)
    for number in range(4):
        stage.end(str(number))
    assert (stage.engine().backlog, stage.engine().kv_tokens, stage.engine().outstanding) == (0, 0, 0)


@pytest.mark.parametrize(("blocks", "first"), [(make_blocks("a" * 40), "again"), (NO_BLOCKS, "half")])
def test_tiles_are_taken_in_the_order_of_what_is_not_cached(blocks: PromptBlocks, first: str) -> None:
    stage = play(1, tiles=TileConfig())
    stage.arrive("seen", 4100, blocks=make_blocks("a" * 40))
    stage.end("seen", at=1.0)
    stage.arrive("stream", 10, request_class=STRICT, at=1.1)
    stage.tokens("stream", at=1.2)
    (begun,) = stage.arrive("half", 3000, sliceable=True, at=1.21)
    assert begun.startswith("slice half e0")
    assert stage.arrive("again", 4100, blocks=blocks, sliceable=True, at=1.22) == []
    after = stage.slice_ended("half", int(begun.split()[-1]), at=1.3)
    for step in range(3):
        after += stage.tokens("stream", at=1.31 + step / 10)
    assert after[0].split()[1] == first
