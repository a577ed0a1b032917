"""What the debug view says of everything; why requests wait is in ``test_reasons``."""

from collections import Counter, deque
from dataclasses import replace

import msgspec
import pytest
from builders import make_scheduler
from interpreted import interpreted
from playbook import Play

from proxy.core.actions import Action
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, EngineReported, Event
from proxy.core.forecast import Spread
from proxy.core.prefix import PromptBlocks
from proxy.core.request import RELAXED, RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.selfreport import EngineReport
from proxy.core.snapshot import view_state, view_waiting
from proxy.sim.engine import EngineConfig
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.profiles import PROFILES
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import ClassShare, draw_workload, sharegpt_like


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
        assert (first["reports"]["fresh"], first["full_at"]) == (False, None)
        assert first["prefixes"] == {"blocks": 0, "tokens": 0, "trust": 1.0}
        assert state["outputs"][0] == {
            "model": "",
            "request_class": "",
            "ended": 0,
            "learnt": False,
            "mean_tokens": None,
        }

    def test_what_engines_tell_and_what_is_learnt(self) -> None:
        play = Play(kv_tokens=10_000, caches_prefixes=True)
        blocks = PromptBlocks((1, 2), (300, 600))
        play.arrive("a", 700, model="m", blocks=blocks)
        play.tokens("a", 30, at=0.1)
        for number in range(3):
            play.handle(EngineReported("e0", EngineReport(3, 0, 0.5, number)), 1.0 + number)
        play.end("a")
        state = view_state(play.scheduler, play.now)
        (engine,) = state.engines
        assert (engine.reports.fresh, engine.reports.foreign_requests) == (True, 2)
        assert engine.reports.kv_error_tokens > 1000
        assert 0.01 < engine.reports.kv_caution <= 0.02
        assert (engine.prefixes.blocks, engine.prefixes.tokens) == (2, 600)
        pooled, kind = state.outputs
        assert (pooled.ended, pooled.mean_tokens, pooled.learnt) == (1, 30.0, False)
        assert (kind.model, kind.request_class, kind.ended) == ("m", "relaxed", 1)

    def test_shares_of_tenants(self) -> None:
        play = Play(max_num_seqs=1, tenant_weights={"paying": 2.0})
        play.arrive("a", 500, tenant="paying")
        play.arrive("b", 400, tenant="other")
        play.arrive("c", 10, tenant="paying")
        (shares,) = view_state(play.scheduler, 1.0).shares
        assert (shares.engines, shares.others) == (["e0"], 0)
        found = [(f.tenant, f.waits, f.tenant_served, f.class_served, f.kv_tokens) for f in shares.flows]
        assert found == [("other", True, 0.0, 500.0, 0.0), ("paying", True, 250.0, 500.0, 500.0)]

    def test_of_many_tenants_those_that_wait_are_shown(self) -> None:
        play = Play()
        for number in range(200):
            play.arrive(f"a{number}", 10, tenant=f"{number}")
            play.end(f"a{number}")
        play.arrive("long", 5000, tenant="long")
        play.arrive("b", 10, tenant="waits")
        (shares,) = view_state(play.scheduler, 1.0).shares
        assert (len(shares.flows), shares.others, shares.flows[0].tenant) == (100, 102, "waits")

    def test_of_nothing(self) -> None:
        state = view_state(make_scheduler(()), 0.0)
        assert (state.engines, state.queues) == ([], [])


def everything_in(root: object) -> list[object]:
    """All that an object is made of, in a fixed order; whatever changes in it, changes this."""
    found: list[object] = []
    seen: dict[int, int] = {}
    to_do = [root]
    while to_do:
        value = to_do.pop()
        if isinstance(value, Spread):
            value = None  # worked out when it is asked for, and no state: the invariants compare it with a new one
        if isinstance(value, type) or callable(value) or value is None or isinstance(value, str | int | float | bytes):
            found.append(value)
            continue
        if id(value) in seen:
            found.append(seen[id(value)])
            continue
        seen[id(value)] = len(seen)
        found.append(type(value).__name__)
        if isinstance(value, dict):
            to_do.extend(part for item in value.items() for part in item)
            continue
        if isinstance(value, list | tuple | set | frozenset | deque):
            to_do.extend(value)
            continue
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        to_do += [getattr(value, name) for name in slots if hasattr(value, name)]
        to_do += getattr(value, "__dict__", {}).values()
    return found


CLASSES = (
    ClassShare(RequestClass("strict", tbt_seconds=0.1, weight=2.0), 0.2),
    ClassShare(RequestClass("prompt", ttft_seconds=1.0, tbt_seconds=0.5), 0.4),
    ClassShare(RequestClass("relaxed", tbt_seconds=0.5), 0.4),
)


@interpreted
@pytest.mark.parametrize("policy", ["gate", "slai", "rad", "tiles"])
def test_looking_changes_nothing(policy: str) -> None:
    """Forecasts are kept once made, and bands once looked at: a look must leave no trace, or it changes decisions."""
    looks = Counter[str]()

    class Watched(Scheduler):
        def handle(self, event: Event, now: float) -> list[Action]:
            actions = super().handle(event, now)
            if self.waiting and isinstance(event, Arrived):
                before = everything_in(self)
                state = view_state(self, now)
                view_state(self, now + 0.5)  # somebody looks between two events
                view_waiting(self, event.request.id, now + 0.5)
                assert everything_in(self) == before
                for queue in state.queues:
                    looks.update(w.partition(":")[0] for ways in queue.head.waits_for.values() for w in ways)
            return actions

    def make(config: SchedulerConfig) -> Scheduler:
        scheduler = Watched(config)
        for number in range(1, 150):
            scheduler.ledger.growth.pooled.learn(number)
        return scheduler

    rules = find_policy(policy).scheduler(PolicyOptions())
    drawn = draw_workload(
        sharegpt_like(500), rate=8.0, requests=80, seed=1, classes=CLASSES, tenants={"a": 3.0, "b": 1.0}
    )
    workload = [replace(r, output_tokens=max(1, r.output_tokens // 4)) for r in drawn]
    engine = EngineConfig(replace(PROFILES["rtx6000ada"], kv_tokens=9600), max_num_seqs=16)
    result = simulate(workload, SimulationConfig(engine, report_seconds=0.5), rules, make_scheduler=make)
    assert all(record.finished_at is not None for record in result.records)
    assert looks["KV cache"], looks


def test_the_head_of_a_queue_is_what_goes_next() -> None:
    """The view has its own account of the order, as the scheduler's changes with every look."""
    play = Play(max_num_seqs=1)
    prompt = RequestClass("prompt", ttft_seconds=3.0)
    play.arrive("now")
    play.tokens("now", at=0.1)
    running, last = "now", 0.1
    for number in range(30):
        kind = prompt if number % 3 == 0 else RELAXED
        play.arrive(
            f"{number}", 50 + 997 * number % 600, at=0.1 + number * 0.05, tenant=f"t{number % 2}", request_class=kind
        )
    last = play.now
    for _ in range(30):
        last += 0.2
        play.now = last
        (queue,) = view_state(play.scheduler, last).queues
        assert play.end(running, at=last) == [f"dispatch {queue.head.request_id} e0"]
        running = queue.head.request_id
        play.tokens(running, at=last + 0.05)
