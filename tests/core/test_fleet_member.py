"""``proxy.core.fleet``: who decides, what it is told, and what becomes of requests when that changes."""

from itertools import pairwise
from typing import Any

import pytest
from builders import make_limits, make_request
from fleet_net import FleetNet

from proxy.core.claims import Quotas
from proxy.core.config import SchedulerConfig
from proxy.core.events import EngineRemoved, EngineReported, EngineUp, Passed, Tokenized
from proxy.core.fleet import FleetConfig, Role, letters
from proxy.core.fleet.leading import Leading
from proxy.core.fleet.letters import Announced, Learnt, Produced
from proxy.core.fleet.line import Line
from proxy.core.limits import EngineLimits
from proxy.core.quota import QuotaLimits
from proxy.core.scheduler import Scheduler
from proxy.core.selfreport import EngineReport
from proxy.core.tiles import TileConfig

LIFE, BEAT, PATIENCE, ROLL_CALL = 2.0, 0.5, 1.0, 1.0
HOP = 0.001


def a_fleet(replicas: int = 3, **more: Any) -> FleetNet:
    """``r1`` leads, ``r2`` and so on follow."""
    net = FleetNet(**more)
    for _ in range(replicas):
        net.start()
    net.run(3.0)
    return net


def roles(net: FleetNet) -> dict[str, Role]:
    return {name: replica.member.role for name, replica in net.replicas.items()}


def waiting(net: FleetNet, name: str | None = None) -> list[tuple[str, str]]:
    return [key for key, call in net.live(name).items() if not call.engine]


def fill(net: FleetNet, name: str = "r1") -> list[tuple[str, str]]:
    """Take all slots of all engines."""
    keys = [(name, net.arrive(name)) for _ in range(net.slots * len(net.engines))]
    net.run(0.1)
    assert not waiting(net)
    for key in keys:
        net.token(key)
    net.run(0.1)
    return keys


# -- who leads, and what that is good for --


def test_one_leads_and_the_others_follow_it() -> None:
    net = a_fleet()
    assert roles(net) == {"r1": Role.LEADER, "r2": Role.FOLLOWER, "r3": Role.FOLLOWER}
    assert {replica.member.leader for replica in net.replicas.values()} == {"r1"}
    assert {replica.member.replicas for replica in net.replicas.values()} == {3}


def test_a_followers_request_starts_a_hop_there_and_a_hop_back_after_it_came() -> None:
    net = a_fleet()
    net.arrive("r2")
    net.run(2 * HOP - 1e-6)
    assert net.running("x") == 0
    net.run(2e-6)
    assert net.running("x") == 1


def test_the_leaders_own_request_starts_at_once() -> None:
    net = a_fleet()
    net.arrive("r1")
    assert net.running("x") == 1


def test_engines_fill_up_over_all_replicas_and_no_further() -> None:
    net = a_fleet(slots=2)
    for number in range(9):
        net.arrive(f"r{number % 3 + 1}")
    net.run(0.5)
    assert (net.running("x"), net.running("y"), len(waiting(net))) == (2, 2, 5)


def test_the_order_is_one_over_all_replicas() -> None:
    net = a_fleet(slots=1, engines=("x",))
    net.arrive("r1")
    for name, tokens in (("r1", 900), ("r2", 300), ("r3", 600), ("r2", 1200), ("r3", 100)):
        net.arrive(name, tokens)
    net.run(3 * HOP)
    started = []
    while running := [key for key, call in net.live().items() if call.engine]:
        started += running
        net.end(running[0])
        net.run(3 * HOP)
    assert started == [("r1", "1"), ("r3", "2"), ("r2", "1"), ("r3", "1"), ("r1", "2"), ("r2", "2")]


def test_a_client_that_leaves_a_follower_makes_room_for_another_replicas_request() -> None:
    net = a_fleet(slots=1, engines=("x",))
    net.arrive("r2")
    net.run(0.01)
    net.arrive("r3")
    net.run(0.01)
    net.end(("r2", "1"), "gone", served=None)
    net.run(0.01)
    assert net.calls["r3", "1"].engine == "x"


def test_a_refusal_reaches_the_replica_whose_request_it_is() -> None:
    net = a_fleet(slots=1, engines=("x",), config=SchedulerConfig(max_queue_requests=1))
    for name in ("r2", "r3", "r2"):
        net.arrive(name)
        net.run(0.01)
    assert [call.outcome for call in net.calls.values()] == ["", "", "queue_full"]


def test_what_a_replica_gives_past_the_queue_counts_for_all_until_it_is_over() -> None:
    net = a_fleet(slots=1, engines=("x",))
    net.feed("r2", Passed("x", begins=True))
    net.run(0.01)
    net.arrive("r1")
    net.arrive("r1")
    net.run(0.01)
    assert net.running("x") == 1  # nothing waits for an engine that has nothing of ours
    net.end(("r1", "1"))
    net.run(0.01)
    net.kill("r2")
    net.run(3 * LIFE)
    assert net.member("r1").scheduler.engines[0].passing == 0


def test_a_replica_that_does_not_know_an_engine_gives_the_request_back() -> None:
    net = a_fleet(2, engines=("x",))
    net.feed("r2", EngineRemoved("x", 0.0))
    net.arrive("r2")
    net.run(0.01)
    assert waiting(net) == [("r2", "1")]
    net.feed("r2", EngineUp("x", EngineLimits()))
    net.run(5.0)
    assert net.calls["r2", "1"].engine == "x"


def test_an_engine_that_the_leader_comes_to_know_later_is_charged_with_what_the_others_have_there() -> None:
    net = a_fleet(2, engines=("x",))
    net.arrive("r2")
    net.run(0.01)
    leader = net.member("r1")
    net.feed("r1", EngineRemoved("x", 0.0))
    net.end(("r2", "1"))
    net.run(0.01)
    assert not leader.scheduler.engines
    net.feed("r1", EngineUp("x", EngineLimits(max_num_seqs=4)))
    net.arrive("r2")
    net.run(0.01)
    assert leader.scheduler.engines[0].outstanding == 1


# -- what is told, and how often --


def test_tokens_are_told_once_a_step_however_many_streams_there_are() -> None:
    net = a_fleet(2, slots=16, engines=("x",))
    keys = [("r2", net.arrive("r2", 10)) for _ in range(16)]
    net.run(1.0)
    for key in keys:
        net.token(key)
    net.run(0.1)
    before, began = len(net.sent_letters), net.now
    for _ in range(100):
        net.run(0.03)
        for key in keys:  # each read in a turn of the loop of its own
            net.token(key)
            net.run(1e-5)
    told = [letter for letter in net.sent_letters[before:] if any(isinstance(n, Produced) for n in letter.notes)]
    assert 100 <= len(told) <= 100 + (net.now - began) / BEAT + 1
    net.run(1.0)
    engine = net.member("r1").scheduler.engines[0]
    assert [engine.context_tokens(f"r2/{key[1]}") for key in keys] == [111] * 16


def test_a_step_is_counted_once_though_several_replicas_tell_of_it() -> None:
    net = a_fleet(3, slots=16, engines=("x",))
    keys = [(name, net.arrive(name, 10)) for name in ("r1", "r2", "r3", "r1", "r3")]
    net.run(0.5)
    for key in keys:
        net.token(key)
    net.run(0.02)
    engine = net.member("r1").scheduler.engines[0]
    before = engine.step
    for _ in range(50):
        for key in keys:
            net.token(key)
        net.run(0.02)
    assert engine.step - before == 50
    assert engine.step_seconds == pytest.approx(0.02, rel=0.05)


def test_followers_are_told_what_the_leader_has_learnt_of_the_engines_and_begin_with_it() -> None:
    net = a_fleet(2, engines=("x",))
    keys = [("r1", net.arrive("r1", 10)) for _ in range(3)]
    for number in range(400):
        for key in keys:
            net.token(key)
        net.run(0.05 + number % 2 * 1e-4)
    assert any(isinstance(note, Learnt) for letter in net.sent_letters for note in letter.notes)
    learnt = net.member("r1").scheduler.engines[0].model
    net.kill("r1")
    net.run(LIFE + BEAT + ROLL_CALL + 0.1)
    model = net.member("r2").scheduler.engines[0].model
    assert net.member("r2").role is Role.LEADER
    assert model.trusted
    load = net.member("r2").scheduler.engines[0].forecast(net.now).loads[0]._replace(decodes=3, kv_tokens=600)
    assert model.predict(load) == pytest.approx(learnt.predict(load), rel=0.05)


def test_a_lost_letter_is_missed_by_the_next_and_everything_is_told_anew() -> None:
    net = a_fleet()
    net.losing = 1
    net.arrive("r2")  # nobody hears of it
    net.run(BEAT + 0.01)
    assert net.calls["r2", "1"].engine
    assert net.member("r1").lost_letters == 1


def test_a_decision_that_is_lost_is_taken_anew() -> None:
    net = a_fleet()
    net.arrive("r2")
    net.run(HOP / 2)
    net.losing = 1  # r2's letter is on its way, and what r1 decides is the next one
    net.run(2 * BEAT + 0.01)
    assert net.calls["r2", "1"].engine
    assert net.calls["r2", "1"].dispatches == 1
    assert net.member("r2").lost_letters == 1
    assert sum(engine.outstanding for engine in net.member("r1").scheduler.engines) == 1


def test_nothing_is_announced_anew_while_nothing_is_lost() -> None:
    net = a_fleet()
    for number in range(60):
        net.arrive(f"r{number % 3 + 1}")
        net.run(0.1)
        for key, call in net.live().items():
            if call.engine:
                net.token(key)
                net.end(key)
    announced = [letter for letter in net.sent_letters if any(isinstance(note, Announced) for note in letter.notes)]
    assert [letter.sender for letter in announced] == ["r2", "r3"]


# -- tiles --


def test_slices_of_a_followers_prompt_are_the_leaders_choice_and_come_one_a_step() -> None:
    net = a_fleet(2, slots=16, engines=("x",), config=SchedulerConfig(tiles=TileConfig(smallest_tokens=16)))
    streams = [(name, net.arrive(name, 10)) for name in ("r1", "r2")]
    net.run(0.1)
    for key in streams:
        net.token(key)
    long = "r2", net.arrive("r2", 3000, sliceable=True)
    seen: list[int] = []
    for _ in range(100):
        net.run(0.05)
        call = net.calls[long]
        if call.engine:
            break
        before = call.slices[:]
        seen += [piece.tokens for piece in before]
        assert len(before) <= 2  # one on its way to each step
        for key in streams:
            net.token(key)
        while call.slices and call.slices[0] in before:
            net.end_slice(long)
    assert net.calls[long].engine == "x"
    assert len(seen) > 3
    assert seen == sorted(seen)


# -- when the leader is gone --


def test_a_leader_that_is_killed_is_replaced_and_what_waits_keeps_its_age() -> None:
    net = a_fleet(3, slots=1, engines=("x",))
    net.arrive("r2", 50)
    net.run(0.01)
    net.arrive("r3", 100)
    net.run(0.5)
    came_at = net.now - 0.5
    net.kill("r1")
    net.run(LIFE + BEAT + ROLL_CALL)
    (leader,) = net.leaders
    name = "3" if leader.id == "r3" else "r3"
    entry = next(e for i, e in leader.scheduler.ledger.entries.items() if i.startswith(name) or leader.id == "r3")
    assert net.running("x") == 1
    assert leader.scheduler.waiting == 1
    waits = [e.waiting for e in leader.scheduler.ledger.entries.values() if e.engine is None]
    assert waits[0].arrived_at == pytest.approx(came_at, abs=0.01)
    assert entry.waiting.arrived_at <= net.now
    net.end(("r2", "1"))
    net.run(0.01)
    assert net.calls["r3", "1"].engine == "x"


def test_a_paused_leader_decides_nothing_when_it_wakes_up_after_its_lease() -> None:
    net = a_fleet(3, slots=1)
    fill(net)
    for _ in range(3):
        net.arrive("r1")
    net.pause("r1")
    net.run(30.0)
    woken = net.member("r1")
    assert [leader.id for leader in net.leaders] != ["r1"]
    net.replicas["r1"].paused = False
    net.replicas["r1"].beats_at = net.now + BEAT
    net.end(("r1", "1"))  # it had a slot, which it would give to its own
    assert woken.role is Role.FOLLOWER
    assert len(waiting(net, "r1")) == 3
    net.run(2 * BEAT)
    assert not net.live() or len(waiting(net, "r1")) == 2  # by the new leader's decision
    assert net.running("x") + net.running("y") == 2


def test_a_killed_followers_requests_make_room_within_a_life_and_a_beat() -> None:
    net = a_fleet(3, slots=2)
    fill(net, "r2")
    net.arrive("r3")
    net.run(0.1)
    net.kill("r2")
    net.run(LIFE + 2 * BEAT)
    assert net.calls["r3", "1"].engine


def test_a_leader_that_drains_hands_over_within_a_beat_and_refuses_only_its_own() -> None:
    net = a_fleet(3, slots=1)
    fill(net)
    for name in ("r1", "r2", "r3"):
        net.arrive(name)
    net.run(0.1)
    net.drain("r1")
    assert net.calls["r1", "3"].outcome == "draining"
    assert len(waiting(net)) == 2
    net.beat("r1")
    net.run(BEAT + ROLL_CALL / 10)
    (leader,) = net.leaders
    assert leader.id != "r1"
    assert sum(engine.outstanding for engine in leader.scheduler.engines) == 2
    for key in [key for key, call in net.live().items() if call.engine]:
        net.end(key)
    net.run(0.01)
    assert not waiting(net)
    net.finish("r1")
    net.run(1.0)
    assert all("r1/" not in i for i in leader.scheduler.ledger.entries)


def test_a_leader_that_drains_with_nothing_in_flight_is_not_waited_for() -> None:
    net = a_fleet(2)
    net.drain("r1")
    net.beat("r1")
    net.finish("r1")
    net.run(BEAT + 0.01)
    assert roles(net) == {"r2": Role.LEADER}


# -- when the store is gone --


def test_without_the_store_each_decides_alone_on_its_part_of_the_engines() -> None:
    net = a_fleet(2, slots=8, engines=("x",))
    net.store_up = False
    net.run(BEAT + PATIENCE + BEAT)
    assert set(roles(net).values()) == {Role.LOCAL}
    for name in ("r1", "r2"):
        for _ in range(8):
            net.arrive(name)
        assert len([1 for call in net.live(name).values() if call.engine]) == 4
    assert net.running("x") == 8


def test_what_ran_before_the_store_went_counts_into_each_ones_part() -> None:
    net = a_fleet(2, slots=8, engines=("x",))
    fill(net, "r1")
    net.store_up = False
    net.run(BEAT + PATIENCE + BEAT)
    for name in ("r1", "r2"):
        for _ in range(8):
            net.arrive(name)
    assert len([1 for call in net.live("r1").values() if call.engine]) == 8
    assert net.running("x") == 12  # by no more than the parts of those that have less than theirs


def test_others_figures_from_the_engine_are_no_part_of_ones_own_share() -> None:
    net = a_fleet(2, slots=8, engines=("x",))
    fill(net, "r1")
    net.store_up = False
    for _ in range(4):
        net.run(PATIENCE)
        net.feed("r2", EngineReported("x", EngineReport(8, 0, 0.1, 0)))
    net.arrive("r2")
    assert net.calls["r2", "1"].engine == "x"


def test_there_is_no_stampede_when_the_store_is_back() -> None:
    net = a_fleet(3, slots=4, engines=("x",))
    keys = fill(net, "r2")
    for name in ("r1", "r2", "r3"):
        for _ in range(5):
            net.arrive(name)
    net.run(0.1)
    net.store_up = False
    net.run(20.0)
    running = net.running("x")
    assert 4 <= running <= 8
    net.store_up = True
    net.run(BEAT + ROLL_CALL + 0.1)
    assert set(roles(net).values()) == {Role.LEADER, Role.FOLLOWER}
    assert net.running("x") == running
    for key in keys:
        net.end(key)
    net.run(0.1)
    assert net.running("x") == 4


def test_a_replica_alone_goes_on_with_all_of_each_engine_while_its_store_is_away() -> None:
    net = a_fleet(1, slots=4, engines=("x",))
    net.store_up = False
    net.run(10.0)
    for _ in range(5):
        net.arrive("r1")
    assert net.running("x") == 4
    net.store_up = True
    net.run(3 * BEAT)
    assert roles(net) == {"r1": Role.LEADER}
    assert net.running("x") == 4


def test_a_short_failure_of_the_store_changes_nothing() -> None:
    net = a_fleet()
    net.store_up = False
    net.run(PATIENCE - 0.1)
    net.store_up = True
    net.run(BEAT)
    assert roles(net) == {"r1": Role.LEADER, "r2": Role.FOLLOWER, "r3": Role.FOLLOWER}


def test_a_replica_that_is_cut_off_decides_alone_and_comes_back() -> None:
    net = a_fleet(2, slots=4, engines=("x",))
    fill(net)
    net.cut_off.add("r2")
    net.arrive("r2")
    net.run(BEAT + PATIENCE + BEAT)
    assert net.member("r2").role is Role.LOCAL
    assert net.calls["r2", "1"].engine == "x"
    assert net.member("r1").role is Role.LEADER
    net.cut_off.clear()
    net.run(2 * BEAT)
    assert net.member("r2").role is Role.FOLLOWER
    assert net.member("r1").scheduler.engines[0].outstanding == 5


def test_a_replica_whose_letters_do_not_arrive_decides_alone_though_the_store_answers_it() -> None:
    net = a_fleet(2, slots=4, engines=("x",))
    net.deaf.add("r2")
    net.arrive("r2")
    net.run(FleetConfig().silent_beats * BEAT + 2 * BEAT)
    assert net.member("r2").role is Role.LOCAL
    assert net.calls["r2", "1"].engine == "x"
    net.deaf.clear()
    net.run(2 * BEAT)
    assert net.member("r2").role is Role.FOLLOWER


def test_never_two_lead_when_the_store_loses_its_memory() -> None:
    net = a_fleet(3, slots=1)
    fill(net)
    for name in ("r1", "r2", "r3"):
        net.arrive(name)
    net.flush_store()
    net.start()  # it has never seen another leader
    for _ in range(400):
        net.run(0.01)
        assert len(net.leaders) <= 1
    assert len(net.leaders) == 1
    assert net.running("x") + net.running("y") == 2


def test_a_leader_whose_answer_comes_after_its_lease_does_not_lead() -> None:
    net = a_fleet(2)
    net.pause("r1", asking=True)
    net.run(LIFE + 0.4)
    net.resume("r1")
    assert net.member("r1").role is not Role.LEADER


def test_a_store_that_has_just_been_made_may_have_forgotten_a_leader() -> None:
    net = FleetNet()
    net.start()
    net.arrive("r1")
    net.run(LIFE - 0.01)
    assert net.running("x") == 0
    net.run(0.02)
    assert net.running("x") == 1


def test_where_the_store_remembers_a_newcomer_leads_at_once() -> None:
    net = FleetNet()
    net.register.beat("another", 0.1, -100.0)
    net.start()
    net.run(0.0)
    net.arrive("r1")
    assert net.running("x") == 1


def test_a_replica_alone_decides_on_while_its_store_comes_back_empty() -> None:
    net = a_fleet(1, slots=1, engines=("x",))
    net.store_up = False
    net.run(5.0)
    net.flush_store()
    net.store_up = True
    for _ in range(40):
        net.arrive("r1")
        net.run(0.1)
        assert net.running("x") == 1
        (key,) = (key for key, call in net.live().items() if call.engine)
        net.end(key)
    assert roles(net) == {"r1": Role.LEADER}


def test_never_two_lead_though_the_store_forgets_twice() -> None:
    for pause in (0.05, 0.3, 0.6, 1.2):
        net = a_fleet(4)
        for _ in range(4):
            net.flush_store()
            net.run(pause)
            assert len(net.leaders) <= 1
            for leader in net.leaders:
                net.pause(leader.id, asking=True)
            net.run(0.01)
        for name, replica in net.replicas.items():
            if replica.paused:
                net.resume(name)
                assert len(net.leaders) <= 1


def test_never_two_lead_though_the_store_forgets_again_while_a_newcomer_waits_for_somebody() -> None:
    net = a_fleet(2)
    (leader,) = net.leaders
    newcomer = net.start()
    net.flush_store()
    for name in "r1", "r2":  # before either has said that it lives
        net.pause(name, asking=False)
    net.run(0.1)
    assert net.member(newcomer).role is Role.ROLL_CALL
    net.flush_store()
    for _ in range(10):
        net.run(0.1)
        assert net.leaders == [leader], "for as long as its lease holds by its own clock"
    net.run(5.0)
    assert [member.id for member in net.leaders] == [newcomer]


def test_never_two_lead_though_a_newcomer_that_waited_for_somebody_leaves() -> None:
    net = a_fleet(2)
    (leader,) = net.leaders
    first, second = net.start(), net.start()
    net.flush_store()
    for name in "r1", "r2":
        net.pause(name, asking=False)
    net.run(0.1)
    assert [net.member(name).role for name in (first, second)] == [Role.ROLL_CALL, Role.FOLLOWER]
    net.drain(first)
    for _ in range(17):
        net.run(0.1)
        assert net.leaders == [leader], "of whom neither newcomer was ever told"
    net.run(5.0)
    assert [member.id for member in net.leaders] == [second]


# -- what else changes while nobody decides --


def test_what_happens_to_a_request_at_a_roll_call_is_known_after_it() -> None:
    net = a_fleet(3, slots=2, engines=("x",))
    for _ in range(2):
        net.arrive("r3", 10)
    net.run(0.01)
    net.arrive("r3", 500)
    net.arrive("r3", 600)
    net.run(0.4)
    net.kill("r1")
    net.run(net.register._leads_until - net.now - 0.01)
    net.pause("r2")  # whom the roll call waits for
    net.run(BEAT + 0.02)
    assert net.member("r3").role is Role.ROLL_CALL
    net.token(("r3", "1"))
    net.end(("r3", "2"))
    net.end(("r3", "3"), "gone", None)
    net.feed("r3", Tokenized("4", 650))
    net.run(ROLL_CALL + BEAT)
    (leader,) = net.leaders
    assert leader.scheduler.engines[0].context_tokens("1") == 11
    assert net.calls["r3", "4"].engine == "x"
    assert leader.scheduler.ledger.entries["4"].waiting.request.prompt_tokens == 650


def test_who_tells_what_it_has_while_the_roll_call_ends_is_heard_to_its_end() -> None:
    scheduler, quotas = Scheduler(), Quotas()
    scheduler.handle(EngineUp("x", make_limits(512, 9)), 0.0)
    leading = Leading("r1", 1, scheduler, quotas)
    line = Line("r2", "r1", 1, leads=False, session=1)
    parts = [letters.Waits(make_request(name, 10), 0.5, claim) for claim, name in enumerate(("1", "2"))]
    claims = [letters.Claimed(number, "k", QuotaLimits(concurrency=5), False, None, None, None) for number in (1, 2)]
    line.notes.append(Announced((parts[0],), (), {"x": 1}, more=True, claims=(claims[1],)))
    line.notes.append(Announced((parts[1],), (), {"x": 2}, claims=(claims[0],)))
    first, second = line.write()
    leading.take(first, 0.0)
    leading.hold(1.0)
    leading.begin((), 1.0)
    leading.take(second, 1.01)
    told = [note for letter in leading.write() for note in letter.notes]
    assert {note.number for note in told if isinstance(note, letters.Judged)} == {1, 2}
    assert {note.request_id for note in told if isinstance(note, letters.Send)} == {"1", "2"}
    assert scheduler.engines[0].passing == 3


def test_an_id_in_use_is_refused_whoever_decides() -> None:
    net = a_fleet(2)
    net.arrive("r2")
    net._numbers["r2"] = 0
    with pytest.raises(ValueError, match="in use"):
        net.arrive("r2")


def test_epochs_only_grow() -> None:
    net = a_fleet(2)
    epochs = []
    for _ in range(3):
        (leader,) = net.leaders
        epochs.append(leader.epoch)
        net.kill(leader.id)
        net.start()
        net.run(2 * LIFE + ROLL_CALL)
    assert all(a < b for a, b in pairwise(epochs))


@pytest.mark.parametrize(
    "times",
    [
        {"beat_seconds": 0.0},
        {"beat_seconds": 1.5},
        {"patience_seconds": 3.0},
        {"roll_call_seconds": 0.4},
        {"silent_beats": 0},
    ],
)
def test_times_that_do_not_go_together_are_refused(times: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fleet|roll call"):
        FleetConfig(**times)


def test_parts_of_an_engine_are_rounded_up() -> None:
    assert EngineLimits(10, 3, None).part(4) == EngineLimits(3, 1, None)
    assert EngineLimits(512, 8, 1000).part(3) == EngineLimits(171, 3, 334)
