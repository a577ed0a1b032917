"""One scheduler, two shells: the simulator and the live driver must take the same decisions at the same microseconds.

The live half here is what the proxy does for a request, with simulated engines for the HTTP: a task that submits,
waits for its ticket, sends, takes tokens as they come and ends the request in a ``finally``.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from virtual import DeadlockError, VirtualLoop, run_in_virtual_time

from proxy.core.actions import Action, Dispatch, Slice, describe
from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.events import EngineReported, EngineUp, SliceEnded
from proxy.core.ordering import first_come_first_served
from proxy.core.rad import RadConfig
from proxy.core.request import RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.tiles import TileConfig
from proxy.server.driver import Driver
from proxy.sim.engine import EngineConfig, Produced, SimulatedEngine
from proxy.sim.fleet import microseconds
from proxy.sim.profiles import PROFILES
from proxy.sim.simulator import SimulationConfig, as_core_request, limits_of, report_of, simulate
from proxy.sim.workload import ClassShare, ScheduledRequest, draw_workload, sharegpt_like

TRACE = sharegpt_like(2_000)
OUTPUT_SHARE = 4
"""Answers are this many times shorter than ShareGPT's, which makes 20 seeds affordable; the rate makes up for it."""

SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "short queue": {"max_queue_requests": 6},
    "impatient queue": {"queue_timeout_seconds": 4.0, "max_wait_seconds": 2.0},
    "tiles": {"tiles": TileConfig()},
    "tenants and deadlines": {"tenant_weights": {"a": 2.0}},
    "tenants in tiles": {"tiles": TileConfig()},
    "tenants with guarantees": {"tenant_guarantees": {"a": 90_000}, "gate": GateConfig(tenant_headroom=0.9)},
    "tenants with guarantees in tiles": {"tenant_guarantees": {"a": 90_000, "b": 30_000}, "tiles": TileConfig()},
    "first come, first served": {"ordering": first_come_first_served(), "max_queue_requests": 20},
    "throughput": {"ordering": first_come_first_served(), "rad": RadConfig(max_hold_seconds=2.0)},
}


CLASSES = (
    ClassShare(RequestClass("strict", 2.0, 0.1, weight=3.0), 0.3),
    ClassShare(RequestClass("relaxed", 8.0, 0.5), 0.7),
)


def workload(seed: int, engines: int, situation: str = "", *, common: bool = False) -> list[ScheduledRequest]:
    tenants: dict[str, Any] = {"tenants": {"a": 1.0, "b": 3.0}, "classes": CLASSES} if "tenants" in situation else {}
    drawn = draw_workload(TRACE, rate=3.2 * engines, requests=150, seed=seed, **tenants)
    shorter = [replace(r, output_tokens=max(1, r.output_tokens // OUTPUT_SHARE)) for r in drawn]
    # Of every four, three begin like others of their kind, some of them with all that they have.
    return [
        replace(r, prefix=f"kind {r.content_seed % 9}", prefix_tokens=1500) if common and r.index % 4 else r
        for r in shorter
    ]


def in_microseconds(seconds: float) -> float:
    """The clock's reading ``seconds`` from now, with the simulator's rounding of both parts."""
    return (microseconds(asyncio.get_running_loop().time()) + microseconds(seconds)) / 1e6


class Engine:
    """A simulated engine on the event loop, as far away as the simulator's."""

    def __init__(self, config: SimulationConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._model = SimulatedEngine(config.engine)
        self._network_seconds = config.network_seconds
        self._streams: dict[str, asyncio.Queue[Produced]] = {}
        self._busy = False

    def send(
        self, sequence_id: str, prompt_tokens: int, output_tokens: int, content: str, common: int = 0
    ) -> asyncio.Queue[Produced]:
        stream = self._streams[sequence_id] = asyncio.Queue()
        sequence = sequence_id, prompt_tokens, output_tokens, content
        self._loop.call_at(in_microseconds(self._network_seconds), self._receive, sequence, common)
        return stream

    def _receive(self, sequence: tuple[str, int, int, str], common: int) -> None:
        self._model.add(*sequence, common=common)
        if not self._busy:
            self._step()

    def _step(self) -> None:
        seconds = self._model.start_step()
        self._busy = seconds is not None
        if seconds is not None:
            self._loop.call_at(in_microseconds(seconds), self._end_step)

    def _end_step(self) -> None:
        if produced := self._model.finish_step():
            self._loop.call_at(in_microseconds(self._network_seconds), self._deliver, produced)
        self._step()

    def report(self, engine_id: str, driver: Driver) -> None:
        """Let the proxy know the engine's own figures."""
        event = EngineReported(engine_id, report_of(self._model))
        self._loop.call_at(in_microseconds(self._network_seconds), driver.feed, event)

    def _deliver(self, produced: list[Produced]) -> None:
        for token in produced:
            self._streams[token.sequence_id].put_nowait(token)


async def probe(engines: dict[str, Engine], driver: Driver, interval_seconds: float) -> None:
    """What the prober does, to the microsecond when the simulator does it."""
    loop = asyncio.get_running_loop()
    while True:
        tick = loop.create_future()
        loop.call_at(in_microseconds(interval_seconds), tick.set_result, None)
        await tick
        for engine_id, engine in engines.items():
            engine.report(engine_id, driver)


async def send_slice(piece: Slice, driver: Driver, engines: dict[str, Engine]) -> None:
    """What becomes of a slice: its one token says that the engine has cached it."""
    await engines[piece.engine_id].send(piece.slice_id, piece.tokens, 1, piece.request_id).get()
    driver.feed(SliceEnded(piece))


async def serve(
    request: ScheduledRequest, driver: Driver, engines: dict[str, Engine], group: asyncio.TaskGroup
) -> None:
    """What a handler does, from the arrival of its request to the end."""
    loop = asyncio.get_running_loop()
    arrival = loop.create_future()
    loop.call_at(microseconds(request.at_seconds) / 1e6, arrival.set_result, None)
    await arrival
    request_id = str(request.index)

    def on_slice(piece: Slice) -> None:
        group.create_task(send_slice(piece, driver, engines))

    ticket = driver.submit(as_core_request(request), driver.now(), on_slice)
    try:
        action = await ticket
        if isinstance(action, Dispatch):
            sizes = request.prompt_tokens, request.output_tokens
            content = request.prefix or request_id
            stream = engines[action.engine_id].send(request_id, *sizes, content, request.prefix_tokens)
            finished = False
            while not finished:
                _, finished = await stream.get()
                driver.on_tokens(request_id, 1, driver.now())
    finally:
        driver.end(request_id)


async def live(
    requests: Sequence[ScheduledRequest], config: SimulationConfig, scheduler_config: SchedulerConfig
) -> list[str]:
    """Run the driver on the virtual clock and return its decision log."""
    loop, log = asyncio.get_running_loop(), list[str]()
    assert isinstance(loop, VirtualLoop)
    scheduler = Scheduler(scheduler_config)
    driver = Driver(scheduler, loop, clock=loop.time, on_action=lambda action, now: log.append(describe(action, now)))
    engines = {f"engine-{number}": Engine(config) for number in range(config.engines)}
    for engine_id in engines:
        driver.feed(EngineUp(engine_id, limits_of(config.engine)))
    probing = loop.create_task(probe(engines, driver, config.report_seconds))
    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(serve(request, driver, engines, group))
    probing.cancel()
    assert (scheduler.waiting, scheduler.dispatched, len(driver._tickets)) == (0, 0, 0)
    driver.close()
    return log


def simulated(
    requests: Sequence[ScheduledRequest], config: SimulationConfig, scheduler_config: SchedulerConfig
) -> list[str]:
    log: list[str] = []

    def note(action: Action, now: float) -> None:
        log.append(describe(action, now))

    simulate(requests, config, scheduler_config, note)
    return log


def digest(log: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(log).encode()).hexdigest()


def test_virtual_timers_of_one_time_run_in_the_order_in_which_they_were_set() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(200):
            loop.call_at(1.0 + number % 2, order.append, number)
        await asyncio.sleep(3)
        assert loop.time() == 3.0

    run_in_virtual_time(main())
    assert order == [*range(0, 200, 2), *range(1, 200, 2)]


def test_virtual_time_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError):
        run_in_virtual_time(main())


def test_the_situations_are_what_they_are_called() -> None:
    decisions: dict[str, set[str]] = {}
    for name, rules in SITUATIONS.items():
        config = SimulationConfig(EngineConfig(PROFILES["rtx6000ada"]), 2)
        log = simulated(workload(3, 2, name), config, SchedulerConfig(**rules))
        decisions[name] = {" ".join(line.split()[1:4:2]) for line in log}
        engines = {"dispatch engine-0", "dispatch engine-1"}
        assert engines <= decisions[name]
    assert "reject queue_full" in decisions["short queue"]
    assert "reject too_late" in decisions["impatient queue"], "who would be timed out is refused before"
    assert {"slice engine-0", "slice engine-1"} <= decisions["tiles"]


CASES = [(seed, list(SITUATIONS)[seed // 2 % len(SITUATIONS)], False) for seed in range(24)]
CASES += [(27, "tiles", False), (197, "tiles", False)]  # their queues empty in between
CASES += [(seed, list(SITUATIONS)[seed // 2 % len(SITUATIONS)], True) for seed in range(12)]


@pytest.mark.parametrize(("seed", "situation", "common"), CASES)
def test_simulator_and_live_driver_decide_alike(seed: int, situation: str, common: bool) -> None:
    engines = 1 + seed % 2
    config = SimulationConfig(EngineConfig(PROFILES["rtx6000ada"]), engines)
    scheduler_config = SchedulerConfig(**SITUATIONS[situation])
    requests = workload(seed, engines, situation, common=common)
    expected = simulated(requests, config, scheduler_config)
    found = run_in_virtual_time(live(requests, config, scheduler_config))
    first = next((pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]), None)
    assert first is None, "the first decision that differs: simulator, then driver"
    assert digest(found) == digest(expected)
    assert len(found) >= len(requests)
