"""Why each request waits, as the debug view says it."""

import pickle
from dataclasses import replace

from builders import ONE_STEP, make_request
from playbook import Play

from proxy.core.events import EngineReported
from proxy.core.rad import RadConfig
from proxy.core.reasons import Reasons, shut_gates
from proxy.core.request import STRICT, RequestClass
from proxy.core.selfreport import EngineReport
from proxy.core.snapshot import WaitView, view_state, view_waiting
from proxy.core.stepmodel import StepLoad
from proxy.core.tiles import TileConfig


def waits(play: Play, request_id: str) -> WaitView:
    found = view_waiting(play.scheduler, request_id, play.now)
    assert found is not None
    return found


def reasons(play: Play, request_id: str) -> dict[str, list[str]]:
    """For each engine, the first words of what is in the way."""
    return {
        engine: [reason.partition(":")[0] for reason in found]
        for engine, found in waits(play, request_id).waits_for.items()
    }


def test_who_does_not_wait_has_no_view_of_it() -> None:
    play = Play()
    play.arrive("a")
    assert view_waiting(play.scheduler, "a", 0.0) is None
    assert view_waiting(play.scheduler, "nobody", 0.0) is None


class TestReasons:
    def test_slots(self) -> None:
        play = Play(max_num_seqs=1)
        play.arrive("a", at=1.0)
        play.tokens("a", at=2.0)
        play.arrive("b", 30, at=3.0)
        play.now = 4.5
        found = waits(play, "b")
        assert reasons(play, "b") == {"e0": ["slots"]}
        assert (found.wait_seconds, found.ahead, found.band, found.prompt_tokens) == (1.5, 0, "ordinary", 30)

    def test_backlog(self) -> None:
        play = Play()
        play.arrive("a", 2000)
        play.arrive("b")
        assert reasons(play, "b") == {"e0": ["backlog"]}

    def test_kv_cache(self) -> None:
        play = Play(kv_tokens=2000)
        play.arrive("a", 1000)
        play.tokens("a", at=0.1)
        play.arrive("b", 900)
        assert reasons(play, "b") == {"e0": ["KV cache"]}

    def test_down_and_backing_off(self) -> None:
        play = Play(engines=("e0", "e1"), max_num_seqs=1)
        assert play.arrive("a", at=1.0) == ["dispatch a e0"]
        play.down("e1")
        play.not_started("a", 5.0, at=2.0)
        play.now = 3.0
        found = waits(play, "a").waits_for
        assert found["e0"][0] == "the engine turned a request away: nothing more for 4.00 s"
        assert found["e1"][0] == "the engine is down"

    def test_others_go_first(self) -> None:
        play = Play(max_num_seqs=1)
        play.arrive("a")
        play.tokens("a", at=0.1)
        play.arrive("long", 900)
        play.arrive("short", 10)
        assert (waits(play, "short").ahead, waits(play, "long").ahead) == (0, 1)
        assert reasons(play, "long") == {"e0": ["slots", "order"]}
        play.now = 70.0
        assert waits(play, "long").band == "overdue"
        assert (waits(play, "short").ahead, waits(play, "long").ahead) == (1, 0)

    def test_several_reasons_at_once(self) -> None:
        play = Play(max_num_seqs=1, kv_tokens=1000)
        play.arrive("a", 900)
        play.arrive("b", 800)
        assert reasons(play, "b") == {"e0": ["slots", "backlog", "KV cache"]}

    def test_only_engines_that_serve_it_are_named(self) -> None:
        play = Play(engines={"e0": ["m"], "e1": ["n"]}, max_num_seqs=1)
        play.arrive("a", model="m")
        play.arrive("b", model="m")
        assert reasons(play, "b").keys() == {"e0"}

    def test_throughput_mode(self) -> None:
        play = Play(max_num_seqs=1, rad=RadConfig(max_hold_seconds=5.0))
        play.arrive("a")
        play.tokens("a", at=0.1)
        play.arrive("b")
        assert reasons(play, "b") == {"e0": ["slots", "throughput mode"]}
        assert view_state(play.scheduler, play.now).engines[0].full_at == 1
        play.now = 5.2
        assert reasons(play, "b") == {"e0": ["slots"]}

    def test_deadlines_of_streams_in_flight(self) -> None:
        play = beside_a_strict_stream()
        assert play.arrive("harmless", 300) == ["dispatch harmless e0"]
        assert play.arrive("b", 200) == []
        assert reasons(play, "b") == {"e0": ["TBT"]}

    def test_growth_that_is_to_be_expected(self) -> None:
        play = Play(kv_tokens=10_000)
        assert not play.engine().outputs.learnt
        for _ in range(200):
            play.engine().outputs.learn(5000)
        play.arrive("a", 1000)
        play.tokens("a", at=0.1)
        play.arrive("b", 500)
        (why,) = waits(play, "b").waits_for["e0"]
        assert why.startswith("KV cache: it needs 500 tokens, 1001 of 10000 are in use or promised, 0 more")
        assert "expected to grow" in why

    def test_slots_that_others_have(self) -> None:
        play = Play(max_num_seqs=4)
        play.arrive("a")
        play.tokens("a", at=0.1)
        for number in range(3):
            play.handle(EngineReported("e0", EngineReport(4, 0, 0.5, 0)), 0.1 + number)
        play.arrive("b")
        assert waits(play, "b").waits_for == {"e0": ["slots: 1 requests and 3 of other clients of at most 4"]}

    def test_the_turn_of_other_tenants(self) -> None:
        play = Play(max_num_seqs=1)
        play.arrive("a", 500, tenant="busy")
        play.tokens("a", at=0.1)
        play.arrive("quiet", 400, tenant="quiet")
        play.arrive("b", 10, tenant="busy")
        play.arrive("c", 20, tenant="busy")
        assert reasons(play, "quiet") == {"e0": ["slots"]}
        assert reasons(play, "b") == {"e0": ["slots", "turn"]}
        assert reasons(play, "c") == {"e0": ["slots", "turn", "order"]}
        assert (waits(play, "c").flows_ahead, waits(play, "c").ahead, waits(play, "c").tenant) == (1, 1, "busy")
        (queue,) = view_state(play.scheduler, 1.0).queues
        assert queue.head.request_id == "quiet"

    def test_kv_cache_that_is_kept_for_other_tenants(self) -> None:
        play = Play(kv_tokens=4000)
        play.arrive("q", 1000, tenant="quiet")
        play.tokens("q", at=0.1)
        play.end("q")
        for number in range(4):
            play.arrive(f"a{number}", 900, tenant="busy")
            play.tokens(f"a{number}", at=play.now + 0.5)
        assert reasons(play, "a2") == {"e0": ["kept"]}
        assert reasons(play, "a3") == {"e0": ["kept", "order"]}

    def test_ttft_deadlines(self) -> None:
        prompt = RequestClass("prompt", ttft_seconds=10.0)
        play = Play(max_num_seqs=1)
        play.arrive("a")
        play.tokens("a", at=0.1)
        play.arrive("short", 10)
        play.arrive("promised", 1000, request_class=prompt)
        found = waits(play, "promised")
        assert (found.band, found.ahead, found.ttft_seconds_left) == ("ordinary", 1, 10.0)
        assert waits(play, "short").ttft_seconds_left is None
        for at, band, ahead in ((9.95, "urgent", 0), (10.05, "hopeless", 1)):
            play.now = at
            found = waits(play, "promised")
            assert (found.band, found.ahead) == (band, ahead)

    def test_tiles(self) -> None:
        play = Play(token_budget=2048, caches_prefixes=True, tiles=TileConfig())
        play.arrive("a", 50)
        play.tokens("a", at=0.03)
        play.arrive("b", 6000, sliceable=True)
        found = waits(play, "b")
        assert found.held_tokens > 0
        assert reasons(play, "b") == {"e0": ["tile"]}


def test_an_idle_open_engine_has_no_gate_shut_whatever_the_rules_say() -> None:
    """So a request that waits beside one shows a fault of the scheduler, and not an excuse."""
    play = Play(kv_tokens=1000, token_budget=1, gate=replace(ONE_STEP, backlog_factor=1e-9))
    engine = play.engine()
    engine.kv_tokens = 900  # as by a wrong account of what has ended
    assert shut_gates(engine, make_request("a", 900), play.scheduler.config, 0.0) == []


class TestObstacles:
    """As ``Reasons``, by what is first in the way of who is next: for counting."""

    def test_nobody_waits(self) -> None:
        play = Play()
        play.arrive("a")
        assert obstacles(play) == {"e0": None}

    def test_the_first_that_is_in_the_way_of_who_is_next(self) -> None:
        play = Play(engines=("e0", "e1", "e2"), max_num_seqs=1)
        for name in ("a", "b", "c"):
            play.arrive(name, 500)
        play.tokens("a", at=0.1)
        play.tokens("b", at=0.1)
        play.down("e2")
        play.arrive("d", at=0.2)
        play.not_started("b", 5.0, at=0.3)
        assert obstacles(play) == {"e0": "slots", "e1": "backing_off", "e2": "down"}

    def test_an_engine_that_does_not_serve_those_who_wait_is_in_nobodys_way(self) -> None:
        play = Play(engines={"e0": ["m"], "e1": ["n"]}, max_num_seqs=1)
        play.arrive("a", model="m")
        play.arrive("b", model="m")
        assert obstacles(play) == {"e0": "slots", "e1": None}

    def test_tiles_and_what_is_half_way(self) -> None:
        play = Play(token_budget=2048, caches_prefixes=True, tiles=TileConfig())
        play.arrive("a", 50)
        play.tokens("a", at=0.03)
        play.arrive("b", 6000, sliceable=True)
        assert not play.scheduler.waiting, "it is half-way"
        assert obstacles(play) == {"e0": "tile"}

    def test_deadlines_of_streams_in_flight(self) -> None:
        play = beside_a_strict_stream()
        play.arrive("harmless", 300)
        play.arrive("b", 200)
        assert obstacles(play) == {"e0": "tbt"}

    def test_to_ask_leaves_no_trace(self) -> None:
        play = Play(token_budget=2048, kv_tokens=10_000, caches_prefixes=True, tiles=TileConfig())
        for _ in range(200):
            play.engine().outputs.learn(5000)
        play.arrive("a", 50)
        play.tokens("a", at=0.03)
        play.arrive("b", 6000, sliceable=True)
        play.arrive("c", 6000, sliceable=True)
        play.tokens("a", at=0.05)
        before = pickle.dumps(play.scheduler.ledger.engines)
        assert set(obstacles(play).values()) <= {"tile", "kv_cache"}
        view_state(play.scheduler, play.now)
        assert pickle.dumps(play.scheduler.ledger.engines) == before


def beside_a_strict_stream() -> Play:
    """Its steps are known: one with 500 prompt tokens takes longer than the stream may wait, one with 300 does not."""
    play = Play(token_budget=2000, gate=replace(ONE_STEP, backlog_factor=1.0, keep_tbt=True))
    for number in range(400):
        tokens = 500 * (number % 4)
        play.engine().model.observe(StepLoad(tokens, 1, 100, 0.0, number % 4 > 0), 0.02 + 2e-4 * tokens)
    play.arrive("a", 10, request_class=STRICT)
    for number in range(4):
        play.tokens("a", at=0.1 + 0.02 * number)
    return play


def obstacles(play: Play) -> dict[str, str | None]:
    reasons = Reasons(play.scheduler, play.now)
    return {engine.id: reasons.obstacle(engine) for engine in play.scheduler.engines}
