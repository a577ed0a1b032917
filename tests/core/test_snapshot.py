"""What the debug view says: why each request waits, and what is believed."""

from dataclasses import replace

import msgspec
import pytest
from builders import ONE_STEP, make_request, make_scheduler
from playbook import Play

from proxy.core.rad import RadConfig
from proxy.core.request import STRICT
from proxy.core.snapshot import WaitView, shut_gates, view_state, view_waiting
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
        assert (found.wait_seconds, found.ahead, found.overdue, found.prompt_tokens) == (1.5, 0, False, 30)

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
        assert waits(play, "long").overdue

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
        play = Play(max_num_seqs=1, rad=RadConfig())
        play.arrive("a")
        play.tokens("a", at=0.1)
        play.arrive("b")
        assert reasons(play, "b") == {"e0": ["slots", "throughput mode"]}

    def test_deadlines_of_streams_in_flight(self) -> None:
        play = Play(gate=replace(ONE_STEP, keep_tbt=True))
        for number in range(400):
            play.engine().model.observe(
                StepLoad(500 * (number % 2), 1, 100, 0.0, number % 2), 0.02 + 0.2 * (number % 2)
            )
        play.arrive("a", 10, request_class=STRICT)
        play.tokens("a", at=0.1)
        assert (view_state(play.scheduler, 0.1).engines[0].slack_seconds or 0) == pytest.approx(0.08, abs=0.01)
        shut = shut_gates(play.engine(), make_request("b", 500), play.scheduler.config, 0.1)
        assert [reason.partition(":")[0] for reason in shut] == ["TBT"]

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


class TestState:
    def test_everything_as_json(self) -> None:
        play = Play(engines={"e0": ["m"], "e1": ["m", "n"]}, max_num_seqs=1, kv_tokens=5000)
        play.arrive("a", 100, model="m", at=1.0)
        play.arrive("b", 100, model="m")
        play.tokens("a", at=1.1)
        play.arrive("c", 200, model="m", size_bytes=70)
        play.arrive("d", 30, model="n")
        state = msgspec.json.decode(msgspec.json.encode(view_state(play.scheduler, 2.5)))
        assert (state["draining"], state["waiting"], state["dispatched"]) == (False, 2, 2)
        assert (state["waiting_tokens"], state["waiting_bytes"]) == (230, 70)
        first, second = state["engines"]
        assert (first["id"], first["up"], first["models"]) == ("e0", True, ["m"])
        assert (first["requests"], first["decodes"], first["kv_tokens"]) == (1, 1, 101)
        assert first["limits"]["kv_tokens"] == 5000
        assert first["step_model"]["coefficients"]["fixed"] > 0
        assert (first["step_model"]["trusted"], first["step_model"]["steps"]) == (False, 0)
        assert (second["up"], second["requests"], second["decodes"]) == (True, 1, 0)
        queues = {tuple(queue["engines"]): queue for queue in state["queues"]}
        assert queues.keys() == {("e0", "e1"), ("e1",)}
        head = queues["e0", "e1"]["head"]
        assert (head["request_id"], head["waits_for"].keys()) == ("c", {"e0", "e1"})
        assert queues["e0", "e1"]["oldest_wait_seconds"] == pytest.approx(1.4)
        assert state["config"]["type"] == "SchedulerConfig"

    def test_of_nothing(self) -> None:
        state = view_state(make_scheduler(()), 0.0)
        assert (state.engines, state.queues) == ([], [])

    def test_looking_changes_nothing(self) -> None:
        play = Play(max_num_seqs=1)
        play.arrive("a", 3000)
        play.arrive("b", 200, at=1.0)
        before = play.scheduler.next_deadline(), repr(play.scheduler), repr(play.engine())
        for now in (1.0, 5.0, 100.0):
            view_state(play.scheduler, now)
            view_waiting(play.scheduler, "b", now)
        assert (play.scheduler.next_deadline(), repr(play.scheduler), repr(play.engine())) == before
