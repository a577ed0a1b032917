"""Engines that are up and yet not fit for work: ejected, stalled, tried again, and brought back gently."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from builders import make_blocks, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from playbook import Play

from proxy.core.events import Arrived, EngineReported
from proxy.core.health import Condition, Health, HealthConfig
from proxy.core.selfreport import EngineReport

TWO = ("e0", "e1")
NAMES = (f"r{number}" for number in count())


def condition(play: Play, engine_id: str = "e0") -> Condition:
    return play.engine(engine_id).health.condition


def place(play: Play) -> tuple[str, str]:
    """Send a request; where it went."""
    name = next(NAMES)
    (action,) = play.arrive(name, 10)
    return name, action.rsplit(" ", 1)[1]


def fail(play: Play, engine_id: str, times: int) -> None:
    """Let an engine fail so many requests in a row, while the other ones serve theirs."""
    while times:
        name, engine = place(play)
        play.end(name, served=engine != engine_id)
        times -= engine == engine_id


def report(play: Play, at: float, **figures: float | None) -> list[str]:
    told = EngineReport(**({"running": 1, "waiting": 0, "kv_usage": 0.1, "preemptions": 0} | figures))  # type: ignore[arg-type]
    return play.handle(EngineReported("e0", told), at)


class TestEjection:
    def test_an_engine_that_fails_time_after_time_gets_nothing_for_a_while(self) -> None:
        play = Play(engines=TWO)
        fail(play, "e0", 4)
        assert condition(play) is Condition.HEALTHY
        fail(play, "e0", 1)
        assert condition(play) is Condition.EJECTED
        for _ in range(5):
            name, engine = place(play)
            assert engine == "e1"
            play.end(name, served=True)

    def test_one_that_fails_half_of_the_time_is_ejected_as_well(self) -> None:
        play = Play(engines=TWO)
        for attempt in range(60):
            name, engine = place(play)
            play.end(name, served=engine != "e0" or attempt % 4 == 0)
        assert condition(play) is Condition.EJECTED

    def test_one_that_fails_now_and_then_is_not(self) -> None:
        play = Play(engines=TWO)
        for attempt in range(200):
            name, engine = place(play)
            play.end(name, served=engine != "e0" or attempt % 5 != 0)
        assert condition(play) is Condition.HEALTHY

    def test_clients_that_leave_say_nothing_of_the_engine(self) -> None:
        play = Play(engines=TWO)
        for _ in range(40):
            play.end(place(play)[0])
        assert condition(play) is Condition.HEALTHY

    def test_the_last_engine_is_never_ejected(self) -> None:
        play = Play(engines=TWO)
        fail(play, "e0", 5)
        fail(play, "e1", 30)
        assert (condition(play, "e0"), condition(play, "e1")) == (Condition.EJECTED, Condition.HEALTHY)

    @pytest.mark.parametrize(("engines", "ejected"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 3)])
    def test_at_most_half_of_the_engines_are_ejected(self, engines: int, ejected: int) -> None:
        play = Play(engines=[f"e{n}" for n in range(engines)])
        for _ in range(60 * engines):
            name, _ = place(play)
            play.end(name, served=False)
        assert sum(e.health.condition is Condition.EJECTED for e in play.scheduler.engines) == ejected

    def test_the_only_engine_of_a_model_is_not_ejected(self) -> None:
        play = Play(engines={"e0": ["a", "b"], "e1": ["a"], "e2": ["a"]})
        for _ in range(30):
            name = next(NAMES)
            play.arrive(name, model="b")
            play.end(name, served=False)
        assert condition(play) is Condition.HEALTHY

    def test_it_comes_back_by_one_request_at_a_time_then_gently_then_wholly(self) -> None:
        play = Play(engines=TWO, max_num_seqs=1)
        fail(play, "e0", 5)
        assert play.arrive("busy") == ["dispatch busy e1"]
        assert play.arrive("probe") == []
        assert play.scheduler.next_deadline() is not None
        assert play.tick(at=play.now + 5.0) == ["dispatch probe e0"]
        assert condition(play) is Condition.PROBATION
        assert play.arrive("next") == []
        assert play.tokens("probe", at=play.now + 0.1) == []
        assert condition(play) is Condition.SLOW_START
        assert play.end("probe", served=True) == ["dispatch next e0"]
        play.end("next", served=True)
        play.tick(at=play.now + 10.0)
        assert condition(play) is Condition.HEALTHY

    def test_a_probe_that_fails_doubles_the_time_up_to_a_minute(self) -> None:
        play = Play(engines=TWO)
        fail(play, "e0", 5)
        times = []
        for _ in range(6):
            until = play.engine("e0").health.until
            assert until is not None
            times.append(until - play.now)
            play.tick(at=until)
            fail(play, "e0", 1)
        assert times == pytest.approx([5, 10, 20, 40, 60, 60])

    def test_a_probe_whose_client_leaves_is_followed_by_another(self) -> None:
        play = Play(engines=TWO, max_num_seqs=1)
        fail(play, "e0", 5)
        play.tick(at=play.now + 6.0)
        name, engine = place(play)
        while engine != "e0":
            name, engine = place(play)
        play.arrive("second", 10)
        assert play.end(name) == ["dispatch second e0"] or condition(play) is Condition.PROBATION

    def test_one_that_has_just_come_back_is_not_trusted_for_a_second_failure(self) -> None:
        play = Play(engines=TWO)
        fail(play, "e0", 5)
        play.tick(at=play.now + 5.0)
        name, engine = place(play)
        while engine != "e0":
            name, engine = place(play)
        play.tokens(name)
        assert condition(play) is Condition.SLOW_START
        play.end(name, served=False)
        assert condition(play) is Condition.EJECTED


class TestWatchdog:
    def streaming(self) -> Play:
        play = Play(engines=TWO)
        assert play.arrive("a", 10) == ["dispatch a e0"]
        for step in range(1, 20):
            play.tokens("a", at=step * 0.03)
        return play

    def test_an_engine_that_gives_no_token_for_many_steps_gets_nothing_new_and_returns_with_a_token(self) -> None:
        play = self.streaming()
        play.tick(at=29.0)
        assert condition(play) is Condition.HEALTHY, "its own figures could tell, but it gives none: patience"
        play.tick(at=31.0)
        assert condition(play) is Condition.STALLED
        assert {place(play)[1] for _ in range(6)} == {"e1"}
        play.tokens("a", at=40.0)
        assert condition(play) is Condition.HEALTHY

    def test_whose_figures_stand_still_is_noticed_sooner_and_whose_figures_rise_is_not(self) -> None:
        play = self.streaming()
        for second in range(1, 12):
            report(play, float(second), tokens=100)
        assert condition(play) is Condition.STALLED
        assert play.engine("e0").health.stalls == 1
        report(play, 12.0, tokens=101)
        assert condition(play) is Condition.HEALTHY, "a proof of progress"
        for second in range(13, 60):
            report(play, float(second), tokens=100 + second)
        assert condition(play) is Condition.HEALTHY, "it works, and a tool call shows nothing until it is complete"

    def test_a_long_step_is_no_stall(self) -> None:
        play = Play()
        play.arrive("a", 10)
        for step in range(1, 60):
            play.tokens("a", at=step * 2.0)
        for second in range(1, 30):
            report(play, 118.0 + second, tokens=100)
        assert condition(play) is Condition.HEALTHY, "a hundred such steps are not over yet"

    def test_answers_that_are_not_streamed_may_be_silent(self) -> None:
        play = Play(engines=TWO)
        play.handle(Arrived(replace(make_request("whole"), streamed=False)), 0.0)
        play.tick(at=500.0)
        assert condition(play) is Condition.HEALTHY

    def test_an_idle_engine_is_not_stalled_and_the_clock_begins_with_its_next_work(self) -> None:
        play = Play(engines=TWO)
        play.tick(at=1000.0)
        play.arrive("a", 10)
        play.tick(at=1029.0)
        assert condition(play) is Condition.HEALTHY
        play.tick(at=1040.0)
        assert condition(play) is Condition.STALLED

    def test_who_waits_is_kept_out_of_an_only_engine_that_is_stuck(self) -> None:
        play = Play(max_num_seqs=2)
        play.arrive("a", 10)
        play.tick(at=100.0)
        assert play.arrive("b", 10) == [], "in our queue it can still go elsewhere, and is told in time"
        assert play.up("e1") == ["dispatch b e1"]

    def test_when_all_clients_have_given_up_one_request_tries_it(self) -> None:
        play = Play()
        play.arrive("a", 10)
        play.tick(at=100.0)
        assert play.arrive("b", 10) == []
        assert play.arrive("c", 10) == []
        assert play.end("a") == ["dispatch b e0"]
        assert condition(play) is Condition.PROBATION
        assert play.tokens("b", at=100.1) == ["dispatch c e0"]
        assert condition(play) is Condition.SLOW_START


class TestRestart:
    def test_another_start_time_or_falling_counters_tell_of_a_restart(self) -> None:
        for before, after in (
            ({"started_at": 1.0}, {"started_at": 2.0}),
            ({"tokens": 500}, {"tokens": 3}),
            ({"preemptions": 5}, {"preemptions": 0}),
        ):
            play = Play()
            report(play, 1.0, **before)
            play.engine().closed_until = 1000.0
            report(play, 2.0, **before)
            assert play.engine().restarts == 0
            report(play, 3.0, **after)
            assert play.engine().restarts == 1
            assert play.engine().closed_until is None
            report(play, 4.0, **after)
            assert play.engine().restarts == 1, "once"

    def test_its_prefix_cache_is_believed_empty(self) -> None:
        play = Play(caches_prefixes=True)
        report(play, 0.0, tokens=100)
        play.arrive("a", 400, blocks=make_blocks("aaa"))
        assert play.scheduler.prefixes.index("e0").tokens
        report(play, 1.0, tokens=0)
        assert not play.scheduler.prefixes.index("e0").tokens


class TestSlowStart:
    def shares(self, play: Play, requests: int = 200) -> Counter[str]:
        placed = Counter[str]()
        names = []
        for _ in range(requests):
            name, engine = place(play)
            names.append(name)
            placed[engine] += 1
            if len(names) > 12:
                play.end(names.pop(0), served=True)
        return placed

    def test_engines_that_are_there_from_the_start_share_alike(self) -> None:
        play = Play(engines=TWO, max_num_seqs=64, token_budget=4096)
        assert all(condition(play, e) is Condition.HEALTHY for e in TWO)

    def test_one_that_comes_later_gets_a_part_that_grows(self) -> None:
        play = Play(engines=("e0",), max_num_seqs=64, token_budget=4096)
        play.arrive("first", 10)
        play.up("e1", token_budget=4096, at=10.0)
        assert condition(play, "e1") is Condition.SLOW_START
        early = self.shares(play)["e1"]
        play.tick(at=15.0)
        half_way = self.shares(play)["e1"]
        play.tick(at=25.0)
        assert condition(play, "e1") is Condition.HEALTHY
        late = self.shares(play)["e1"]
        assert early < half_way < late
        assert early < 60

    def test_nothing_waits_for_the_sake_of_a_gentle_start(self) -> None:
        play = Play(engines=("e0",), max_num_seqs=1)
        play.arrive("first", 10)
        play.down("e0", at=1.0)
        play.up("e1", max_num_seqs=4, at=2.0)
        assert [place(play)[1] for _ in range(4)] == ["e1"] * 4


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["release", "token", "progress", "ok", "bad", "left", "stall", "empty", "eject"]),
            st.sampled_from([0.0, 0.1, 5.0, 70.0]),
        ),
        max_size=40,
    )
)
def test_in_any_order_it_stays_a_state_machine(steps: list[tuple[str, float]]) -> None:
    health, now, live = Health(HealthConfig()), 0.0, list[str]()
    for number, (what, seconds) in enumerate(steps):
        now += seconds
        health.tick(now)
        if what == "release" and health.takes(now):
            live.append(f"r{number}")
            health.release(live[-1], now)
        elif live and what == "token":
            health.first_token(live[0], now)
        elif what == "progress":
            health.progress(now)
        elif live and what == "ok":
            health.served(live.pop(0), now)
        elif live and what == "bad":
            health.failed(live.pop(0))
        elif live and what == "left":
            health.left(live.pop(0))
        elif what == "stall" and live:
            health.stall(now)
        elif what == "eject" and health.fails_too_often():
            health.eject(now)
        if not live:
            health.emptied(now)
        assert health.probe is None or health.probe in live
        assert (health.until is not None) == (health.condition is Condition.EJECTED)
        assert 0 < health.share(now) <= 1
        assert health.condition is not Condition.STALLED or live, "nothing is stalled for ever"
        assert health._ejection_seconds <= 60.0
