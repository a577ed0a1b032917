"""What queueing theory and the SLAI paper's theorems say, checked on the simulated engine.

In the paper's setting a step takes time only by the tiles in it, prompts are whole tiles, and memory holds a tile of
the largest requests. Drift is judged by batch means over independent seeds (Student's t), not by eye.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from proxy.sim import kvcache
from proxy.sim.bound import Limits, Needs, bound
from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.fleet import TimedEngine
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.profiles import PROFILES, Jitter, Profile, StepModel
from proxy.sim.records import summarise
from proxy.sim.schedulers import EngineSchedulerName
from proxy.sim.schedulers.deadline import DeadlineScheduler
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import Lengths, Trace, draw_workload, sharegpt_like

TRACE = sharegpt_like(500)
TILE = 8
PAPER = Profile(
    "the paper's", StepModel(0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, TILE), 10_000_000, "eq. (7), no attention"
)
TILE_SECONDS = 0.001 * TILE

Batch = list[tuple[int, bool]]
"""Tokens of each sequence in a step, and whether it decodes."""


@dataclass
class Path:
    """One run of an engine: the work left at each step, and what its steps held."""

    times: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    """Tokens that came and are not served, as each step begins."""
    served: list[int] = field(default_factory=list)
    """Tokens of each step."""
    batches: list[Batch] = field(default_factory=list)
    emptied: int = 0
    """How often nothing was left."""
    begun: list[int] = field(default_factory=list)
    """Prompts without their first token, as each step begins."""


def run(
    scheduler: EngineSchedulerName,
    sizes: Sequence[Lengths],
    arrivals: Sequence[float],
    config: EngineConfig | None = None,
) -> Path:
    """Serve requests until the last has come (not until the last is served)."""
    config = config or EngineConfig(PAPER, TILE, TILE, scheduler=scheduler)
    engine, path = SimulatedEngine(config), Path()
    now, next_index, work = 0.0, 0, 0.0
    prompts: set[str] = set()
    while next_index < len(sizes):
        while next_index < len(sizes) and arrivals[next_index] <= now:
            size = sizes[next_index]
            engine.add(str(next_index), size.prompt_tokens, size.output_tokens, tbt_seconds=0.5)
            work += size.prompt_tokens + size.output_tokens - 1
            prompts.add(str(next_index))
            next_index += 1
        seconds = engine.start_step()
        if seconds is None:
            path.emptied += 1
            now = arrivals[next_index] if next_index < len(sizes) else now
            continue
        assert engine._batch is not None
        batch = [(tokens, sequence.decoding) for sequence, tokens in engine._batch]
        path.times.append(now)
        path.work.append(work)
        path.begun.append(len(prompts))
        path.batches.append(batch)
        path.served.append(sum(tokens for tokens, _ in batch))
        now += seconds
        work -= path.served[-1]
        prompts -= {produced.sequence_id for produced in engine.finish_step()}
    return path


def poisson(rate: float, count: int, rng: random.Random) -> list[float]:
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals


def load_paths(
    scheduler: EngineSchedulerName, distribution: Sequence[Lengths], load: float, count: int, seeds: Sequence[int]
) -> Iterator[Path]:
    """Run at ``load`` times the bound of the paper's Theorem 1."""
    limit = bound(PAPER.step, Limits(TILE, TILE, PAPER.kv_tokens), Needs.of(distribution)).requests_per_second
    for seed in seeds:
        rng = random.Random(f"{seed}")
        sizes = rng.choices(distribution, k=count)
        yield run(scheduler, sizes, poisson(load * limit, count, rng))


def growth(path: Path) -> float:
    """How much more work is left in the last quarter of the time than in the second, over all the work that came."""
    end = path.times[-1]
    quarters: list[list[float]] = [[], [], [], []]
    for time, work in zip(path.times, path.work, strict=True):
        quarters[min(3, int(4 * time / end))].append(work)
    return (fmean(quarters[3]) - fmean(quarters[1])) / (path.work[-1] + sum(path.served))


def t_of(values: Sequence[float]) -> float:
    """Student's t of their mean against zero."""
    return fmean(values) / max(1e-12, stdev(values) / sqrt(len(values)))


LENGTHS = st.lists(
    st.builds(Lengths, st.integers(1, 6).map(lambda n: n * TILE), st.integers(2, 20)), min_size=1, max_size=6
)
SEEDS = range(5)
T_ONE_IN_A_HUNDRED = 3.75
"""Student's t, four degrees of freedom, one-sided."""
FEW = settings(max_examples=5, derandomize=True, database=None, deadline=None, phases=[Phase.generate])


# -- Theorem 1: beyond the bound no scheduler is stable --


@pytest.mark.parametrize("scheduler", list(EngineSchedulerName))
def test_beyond_the_bound_the_backlog_of_every_scheduler_grows(scheduler: EngineSchedulerName) -> None:
    rng = random.Random(f"{scheduler}")
    distribution = [Lengths(TILE * rng.randint(1, 6), rng.randint(2, 20)) for _ in range(4)]
    load = rng.uniform(1.3, 1.6)
    found = []
    for path in load_paths(scheduler, distribution, load, 500, SEEDS):
        most = TILE / TILE_SECONDS
        served = 0
        for time, tokens in zip(path.times, path.served, strict=True):
            assert tokens <= TILE or scheduler is EngineSchedulerName.ORCA  # its steps are longer than a tile
            assert served <= time * most + 1e-6, "no more is served by any time than whole tiles can"
            served += tokens
        found.append(growth(path))
    assert t_of(found) > T_ONE_IN_A_HUNDRED
    assert fmean(found) > 0.25 * (1 - 1 / load)


# -- Theorem 2: below the bound RAD is stable --


@FEW
@given(LENGTHS, st.floats(0.4, 0.85))
def test_below_the_bound_rad_is_stable(distribution: list[Lengths], load: float) -> None:
    found = []
    for path in load_paths(EngineSchedulerName.RAD, distribution, load, 500, SEEDS):
        found.append(growth(path))
        end = path.times[-1]
        late = [work for time, work in zip(path.times, path.work, strict=True) if time > end / 2]
        assert min(late) <= 2 * TILE * TILE, "it comes back to next to nothing, again and again"
    error = stdev(found) / sqrt(len(found))
    assert fmean(found) + T_ONE_IN_A_HUNDRED * error < 0.04, "a drift of more than that is ruled out"


@pytest.mark.parametrize("scheduler", [EngineSchedulerName.ORCA, EngineSchedulerName.SARATHI])
def test_the_same_test_sees_what_is_not_stable(scheduler: EngineSchedulerName) -> None:
    """One sequence at a time wastes tiles, and is unstable far below the bound: the test can fail."""
    config = EngineConfig(PAPER, TILE, 1, scheduler=scheduler)
    distribution = [Lengths(TILE, 40)]
    limit = bound(PAPER.step, Limits(TILE, TILE, PAPER.kv_tokens), Needs.of(distribution)).requests_per_second
    found = []
    for seed in SEEDS:
        arrivals = poisson(0.7 * limit, 800, random.Random(f"{seed}"))
        found.append(growth(run(scheduler, distribution * 800, arrivals, config)))
    assert t_of(found) > T_ONE_IN_A_HUNDRED


# -- RAD's steps --


@FEW
@given(LENGTHS, st.floats(0.3, 2.0), st.integers(0, 100))
def test_every_step_of_rad_is_a_full_tile_unless_all_that_is_there_decodes(
    distribution: list[Lengths], load: float, seed: int
) -> None:
    (path,) = load_paths(EngineSchedulerName.RAD, distribution, load, 300, [seed])
    for batch, without_first_token in zip(path.batches, path.begun, strict=True):
        kinds = {decoding for _, decoding in batch}
        assert len(kinds) == 1, "prompts and streams share no step"
        assert len(batch) <= TILE
        if sum(tokens for tokens, _ in batch) < TILE:
            assert kinds == {True}
            assert not without_first_token


# -- what holds of every queue --


@pytest.mark.parametrize("scheduler", list(EngineSchedulerName))
def test_littles_law(scheduler: EngineSchedulerName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in the engine, averaged over time by its own book, are rate times time in it by the clients' records."""
    area = [0.0]
    last: list[tuple[float, int]] = [(0.0, 0)]
    step: Callable[[TimedEngine], None] = TimedEngine._step
    receive = TimedEngine._receive

    def note(engine: TimedEngine) -> None:
        time, inside = last[0]
        area[0] += inside * (engine._clock.now - time)
        last[0] = engine._clock.now, engine.model.running + engine.model.waiting

    def watched_step(engine: TimedEngine) -> None:
        step(engine)
        note(engine)

    def watched_receive(engine: TimedEngine, prompt: object) -> None:
        receive(engine, prompt)  # type: ignore[arg-type]
        note(engine)

    monkeypatch.setattr(TimedEngine, "_step", watched_step)
    monkeypatch.setattr(TimedEngine, "_receive", watched_receive)
    config = SimulationConfig(EngineConfig(scheduler=scheduler), network_seconds=0.0)
    records = simulate(draw_workload(sharegpt_like(500), rate=1.6, requests=80, seed=3), config, None).records
    stays = sum((r.finished_at or 0.0) - r.request.at_seconds for r in records)
    assert area[0] == pytest.approx(stays, rel=1e-6)


@pytest.mark.parametrize("scheduler", list(EngineSchedulerName))
def test_tokens_are_conserved(scheduler: EngineSchedulerName) -> None:
    """What went into steps is what was asked for, and without preemption not a token more."""
    engine = SimulatedEngine(EngineConfig(scheduler=scheduler))
    sizes = sharegpt_like(60).lengths
    for index, size in enumerate(sizes):
        engine.add(str(index), size.prompt_tokens, size.output_tokens, tbt_seconds=0.5)
    made = 0
    while engine.start_step() is not None:
        made += len(engine.finish_step())
    assert made == engine.generation_tokens == sum(size.output_tokens for size in sizes)
    assert engine.preemptions == 0
    assert engine.prompt_tokens == sum(size.prompt_tokens for size in sizes)


def test_one_request_at_a_time_waits_as_pollaczek_and_khinchine_say() -> None:
    """With one slot and answers of one token the engine is an M/G/1 queue."""
    sizes = [Lengths(100, 1), Lengths(400, 1), Lengths(900, 1)]
    seconds = [-(-size.prompt_tokens // TILE) * TILE / 1000 for size in sizes]
    rate = 0.6 / fmean(seconds)
    expected = rate * fmean(s * s for s in seconds) / (2 * (1 - 0.6))
    config = SimulationConfig(EngineConfig(PAPER, 1024, 1), network_seconds=0.0)
    found = []
    for seed in range(6):
        records = simulate(
            draw_workload(Trace("", tuple(sizes) * 500, 0), rate=rate, requests=1500, seed=seed), config, None
        )
        found.append(fmean((r.ttft_seconds or 0.0) for r in records.records) - fmean(seconds))
    error = stdev(found) / sqrt(len(found))
    assert abs(fmean(found) - expected) < 4.77 * error, "Student's t, five degrees of freedom, one in a hundred"
    assert error < 0.15 * expected


@settings(FEW, max_examples=25)
@given(
    st.sampled_from(list(EngineSchedulerName)),
    st.integers(0, 10**6),
    st.floats(0.5, 4.0),
    st.sampled_from([40_000, 235_728]),
)
def test_two_runs_with_one_seed_are_one(scheduler: EngineSchedulerName, seed: int, rate: float, kv_tokens: int) -> None:
    requests = draw_workload(TRACE, rate=rate, requests=40, seed=seed)
    profile = replace(PROFILES["rtx6000ada"], kv_tokens=kv_tokens)
    config = SimulationConfig(EngineConfig(profile, scheduler=scheduler, jitter=Jitter()), seed=seed)
    first, second = (simulate(requests, config, None) for _ in range(2))
    assert (first.steps, first.preemptions) == (second.steps, second.preemptions)
    assert [r.gaps for r in first.records] == [r.gaps for r in second.records]
    assert summarise(first.records) == summarise(second.records)


class AskedOneByOne(DeadlineScheduler):
    """Asks of every stream by itself whether the step has time for it."""

    def _split(self, streams: list[kvcache.Sequence]) -> tuple[list[kvcache.Sequence], list[kvcache.Sequence]]:
        return [], streams

    def _none_in_time(self, streams: list[kvcache.Sequence]) -> bool:
        del streams
        return False


@pytest.mark.parametrize(("seed", "rate", "kv_tokens"), [(1, 2.5, 40_000), (2, 1.8, 235_728), (3, 4.0, 100_000)])
def test_the_short_cuts_of_deadline_change_nothing(seed: int, rate: float, kv_tokens: int) -> None:
    requests = draw_workload(TRACE, rate=rate, requests=80, seed=seed)
    profile = replace(PROFILES["rtx6000ada"], kv_tokens=kv_tokens)
    runs = [
        simulate(requests, SimulationConfig(EngineConfig(profile, 2048, scheduler=scheduler)), None)
        for scheduler in (DeadlineScheduler, AskedOneByOne)
    ]
    assert runs[0].steps == runs[1].steps
    assert [r.gaps for r in runs[0].records] == [r.gaps for r in runs[1].records]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("fcfs", "e84aeaa48ff654cf"),
        ("slai-engine", "5f17d2994d2cacb4"),
        ("deadline", "cc5ce2375c070e4a"),
    ],
)
def test_a_run_is_the_same_on_every_python(name: str, digest: str) -> None:
    """Of 3.11; 3.12 and 3.13 were seen to give it too. Who changes a policy, a profile or the workload changes it."""
    policy = find_policy(name)
    requests = draw_workload(TRACE, rate=2.0, requests=60, seed=7)
    result = simulate(requests, policy.simulation(SimulationConfig(), 7), policy.scheduler(PolicyOptions()))
    times = repr([(r.first_token_at, r.finished_at) for r in result.records])
    assert hashlib.sha256(times.encode()).hexdigest()[:16] == digest
