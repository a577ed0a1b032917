"""``proxy.sim.replicas``: several replicas of the proxy before the same engines."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from interpreted import interpreted

from proxy.core.actions import Action, Reject, describe
from proxy.core.config import SchedulerConfig
from proxy.core.engine import EngineBelief
from proxy.core.fleet import Member, Register
from proxy.core.scheduler import Scheduler
from proxy.core.tiles import TileConfig
from proxy.sim.engine import EngineConfig
from proxy.sim.policies import find_policy, read_replicas
from proxy.sim.replicas import Decider
from proxy.sim.simulator import SimulationConfig, SimulationResult, simulate
from proxy.sim.workload import ScheduledRequest, draw_workload, sharegpt_like

TRACE = sharegpt_like(2_000)
TILES = SimulationConfig(EngineConfig(token_budget=8192), engines=2)


def workload(seed: int, rate: float, requests: int = 120) -> list[ScheduledRequest]:
    drawn = draw_workload(TRACE, rate=rate, requests=requests, seed=seed)
    return [replace(r, output_tokens=max(1, r.output_tokens // 4)) for r in drawn]


class OneMember(Member):
    """The only replica there is, as a scheduler to the run."""

    def __init__(self, rules: SchedulerConfig) -> None:
        super().__init__("only", Scheduler(rules))
        assert self.on_standing(Register(born=-inf).beat("only", 1e9, 0.0), 0.0, 0.0) == []
        self.config = rules  # type: ignore[assignment]  # of no use to a member any more, and the run asks for it

    @property
    def engines(self) -> tuple[EngineBelief, ...]:
        return self.scheduler.engines


def decisions(
    seed: int,
    config: SimulationConfig,
    rules: SchedulerConfig,
    make: Callable[[SchedulerConfig], Decider] | None = None,
) -> tuple[list[str], SimulationResult]:
    log: list[str] = []

    def note(action: Action, now: float) -> None:
        log.append(describe(action, now))

    result = simulate(workload(seed, 3.2 * config.engines), config, rules, note, make_scheduler=make)
    return log, result


@interpreted
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("config", "rules"),
    [
        (SimulationConfig(engines=2), SchedulerConfig()),
        (TILES, SchedulerConfig(tiles=TileConfig())),
        (SimulationConfig(), SchedulerConfig(max_queue_requests=6, queue_timeout_seconds=4.0, max_wait_seconds=2.0)),
    ],
    ids=["whole prompts", "tiles", "refusing"],
)
def test_a_member_alone_decides_to_the_microsecond_what_a_scheduler_does(
    seed: int, config: SimulationConfig, rules: SchedulerConfig
) -> None:
    plain, _ = decisions(seed, config, rules)
    alone, _ = decisions(seed, config, rules, OneMember)  # type: ignore[arg-type]
    assert len(plain) >= 120
    assert alone == plain


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rules", [SchedulerConfig(), SchedulerConfig(tiles=TileConfig())], ids=["whole", "tiles"])
def test_every_request_is_served_whichever_replica_it_comes_to(rules: SchedulerConfig, apart: bool) -> None:
    config = replace(TILES if rules.tiles else SimulationConfig(engines=2), replicas=3, apart=apart)
    log, result = decisions(1, config, rules)
    assert all(record.error is None and record.finished_at for record in result.records)
    assert len({line.split()[2] for line in log if " dispatch " in line}) == 120
    assert bool(result.letters) != apart


def test_letters_are_no_more_than_steps_arrivals_and_ends_make_necessary() -> None:
    _, result = decisions(2, replace(SimulationConfig(engines=2), replicas=2), SchedulerConfig())
    tokens = sum(record.request.output_tokens for record in result.records)
    seconds = max(record.finished_at or 0.0 for record in result.records)
    assert result.letters < 1.2 * result.steps + 4 * len(result.records) + 5 * seconds
    assert result.letters < tokens / 2


def test_a_fleet_refuses_as_one_where_replicas_apart_each_fill_a_queue_of_their_own() -> None:
    rules = SchedulerConfig(max_queue_requests=4)

    def refused(**of: object) -> int:
        config = replace(SimulationConfig(), **of)  # type: ignore[arg-type]
        actions: list[Action] = []
        simulate(workload(3, 8.0), config, rules, lambda action, _: actions.append(action))
        return sum(isinstance(action, Reject) for action in actions)

    one, fleet, apart = refused(), refused(replicas=4), refused(replicas=4, apart=True)
    assert one > 0
    assert fleet == pytest.approx(one, rel=0.1)
    assert apart < fleet


def test_policies_are_had_with_replicas_by_name() -> None:
    simulation = find_policy("gate@4").simulation(SimulationConfig(), 1)
    assert (simulation.replicas, simulation.apart) == (4, False)
    simulation = find_policy("tiles@2-apart").simulation(SimulationConfig(), 1)
    assert (simulation.replicas, simulation.apart) == (2, True)
    assert find_policy("gate@4").name == "gate@4"
    for name, message in (("fcfs@2", "no proxy"), ("gate@0", "no number"), ("gate@4-alone", "no number"), ("x@2", "x")):
        with pytest.raises(ValueError, match=message):
            find_policy(name)


@pytest.mark.parametrize("text", ["", "0", "65", "-1", "4-", "x", "4-apar", "1.5"])
def test_what_is_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="replicas"):
        read_replicas(text)
