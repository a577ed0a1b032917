"""``slai-loadgen demo``: the same requests straight to simulated engines, through the proxy, and in the simulator."""

from __future__ import annotations

import asyncio
import signal
from asyncio import FIRST_COMPLETED
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from loadgen.children import Child, ChildError, running
from loadgen.comparison import run_rounds
from loadgen.progress import open_display
from loadgen.report import SCHEMA_VERSION, Document, build_document, describe_classes
from loadgen.runner import NotReadyError, run_workload, wait_until_ready
from proxy import __version__
from proxy.core.config import SchedulerConfig
from proxy.core.ordering import AGING_SECONDS
from proxy.core.request import RequestClass
from proxy.sim.engine import EngineConfig
from proxy.sim.profiles import PROFILES
from proxy.sim.simulator import SimulationConfig, simulate
from proxy.sim.workload import SHAREGPT_LIKE, ClassShare, ScheduledRequest, draw_workload, sharegpt_like

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from rich.console import Console

    from loadgen.comparison import Serve
    from loadgen.results import Result
    from proxy.sim.records import RequestRecord

_T = TypeVar("_T")

DIRECT, PROXY = "direct", "proxy"
"""The two sides."""

PROFILE = "rtx6000ada"
ENGINES = 2
TOKEN_BUDGET = 512
MAX_NUM_SEQS = 128

# The longest answers of ShareGPT take over a minute. Until as many end as begin the load still grows, and a
# demonstration has no time to wait for that.
OUTPUT_SCALE = 0.5

CLASSES = (
    ClassShare(RequestClass("strict", ttft_seconds=1.0, tbt_seconds=0.1), 0.05),
    ClassShare(RequestClass("relaxed", ttft_seconds=1.0, tbt_seconds=0.5), 0.95),
)


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What to demonstrate. Rate and results are in the engines' own time, which passes ``speed`` times as fast as ours.

    The defaults: a load near the most that the engines can do, half a minute for each side, and a seed whose draw is
    an ordinary one (the median TTFT through the proxy is 0.4 to 0.75 of the direct one, seed by seed).
    """

    rate: float = 4.7
    """Requests per second to both engines together."""
    requests: int = 360
    speed: float = 3.0
    seed: int = 0

    def workload(self) -> list[ScheduledRequest]:
        """Draw the requests; every run of the demonstration gets the same."""
        drawn = draw_workload(sharegpt_like(), rate=self.rate, requests=self.requests, seed=self.seed, classes=CLASSES)
        return [replace(r, output_tokens=max(2, round(r.output_tokens * OUTPUT_SCALE))) for r in drawn]

    def config(self) -> dict[str, Any]:
        """Describe the plan for a report."""
        return {
            "version": __version__,
            **asdict(self),
            "classes": describe_classes(CLASSES),
            "scale_outputs": OUTPUT_SCALE,
            "engines": ENGINES,
            "profile": PROFILE,
            "token_budget": TOKEN_BUDGET,
            "max_num_seqs": MAX_NUM_SEQS,
        }

    def document(
        self, records: Sequence[RequestRecord], *, time_scale: float = 1.0, interrupted: bool = False
    ) -> Document:
        """Report on one run of the plan."""
        return build_document(
            records,
            planned=self.requests,
            config={**self.config(), "time_scale": time_scale},
            trace={"name": SHAREGPT_LIKE},
            interrupted=interrupted,
        )


@dataclass(slots=True)
class Outcome:
    """What has come of a demonstration so far; runs that did not take place are missing."""

    plan: DemoPlan
    live: dict[str, Document] = field(default_factory=dict)
    simulated: dict[str, Document] = field(default_factory=dict)
    interrupted: bool = False
    failure: str | None = None

    @property
    def valid(self) -> bool:
        """Whether both sides were measured and can be compared."""
        return len(self.live) == 2 and all(document["valid"] for document in self.live.values())

    def document(self) -> Document:
        """The whole as it goes to JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "config": self.plan.config(),
            "live": self.live,
            "simulated": self.simulated,
            "interrupted": self.interrupted,
            "valid": self.valid,
        }


class _InterruptedError(Exception):
    """A signal asked to end."""


def run_demo(plan: DemoPlan, notes: Console) -> Outcome:
    """Measure and predict; progress goes to ``notes``. Whatever happens, no process that it started stays behind."""
    outcome, workload = Outcome(plan), plan.workload()
    try:
        asyncio.run(_measure(plan, workload, outcome.live, notes))
        _tell(notes, 3, "the same two runs in the simulator\n")
        for side, scheduler in ((DIRECT, None), (PROXY, _scheduler_config())):
            result = simulate(workload, _simulation_config(), scheduler)
            outcome.simulated[side] = plan.document(result.records)
    except (_InterruptedError, KeyboardInterrupt):
        outcome.interrupted = True
    except (ChildError, NotReadyError) as error:
        outcome.failure = str(error)
    return outcome


def _tell(notes: Console, part: int, what: str) -> None:
    notes.print(f"[{part}/3] {what}", markup=False, highlight=False)


def _simulation_config() -> SimulationConfig:
    return SimulationConfig(EngineConfig(PROFILES[PROFILE], TOKEN_BUDGET, MAX_NUM_SEQS), ENGINES)


def _scheduler_config() -> SchedulerConfig:
    return SchedulerConfig()


def _engine_arguments(plan: DemoPlan) -> list[str]:
    ports = ",".join("0" * ENGINES)
    limits = ["--token-budget", str(TOKEN_BUDGET), "--max-num-seqs", str(MAX_NUM_SEQS)]
    return ["proxy", "engine", "--ports", ports, "--profile", PROFILE, "--speed", str(plan.speed), *limits]


def _proxy_arguments(plan: DemoPlan, engines: str) -> list[str]:
    scheduler = _scheduler_config()
    # The proxy lives in real time, so all that it measures in seconds has to pass as fast as the engines' time does.
    seconds = {
        "--aging-seconds": AGING_SECONDS,
        "--max-wait-seconds": scheduler.max_wait_seconds,
        "--queue-timeout-seconds": scheduler.queue_timeout_seconds,
    }
    limits = ["--token-budget", str(TOKEN_BUDGET), "--max-num-seqs", str(MAX_NUM_SEQS)]
    scaled = [word for flag, value in seconds.items() for word in (flag, str(value / plan.speed))]
    return ["proxy", "serve", "--engines", engines, "--port", "0", "--log-level", "warning", *limits, *scaled]


async def _measure(
    plan: DemoPlan, workload: Sequence[ScheduledRequest], live: dict[str, Document], notes: Console
) -> None:
    """Fill ``live`` with both sides' documents.

    Raises:
        ChildError: a process did not come up, or ended.
        NotReadyError: a process came up and does not answer.
        _InterruptedError: a signal came; what had been measured by then is in ``live``.
    """
    children: list[Child] = []
    with _stop_on_signals() as stop:
        async with AsyncExitStack() as stack:

            async def start(name: str, arguments: list[str], address: str) -> str:
                child = await stack.enter_async_context(running(name, arguments, address=address))
                children.append(child)
                child.ended.add_done_callback(lambda _: stop.set())
                return child.address

            async def start_all() -> tuple[list[str], str, str]:
                engines = await start("the simulated engines", _engine_arguments(plan), r"(http://\S+)$")
                proxy = await start("the proxy", _proxy_arguments(plan, engines), r"listens on (http://\S+)")
                model = await wait_until_ready([*engines.split(","), proxy], patience_seconds=10.0)
                return engines.split(","), proxy, model

            engines, proxy, model = await _unless(stop, start_all(), children)

            async def serve(urls: Sequence[str], requests: Sequence[ScheduledRequest]) -> list[Result]:
                with open_display(notes) as display:
                    records = await run_workload(
                        requests, urls, model=model, time_scale=plan.speed, progress=display, stop=stop
                    )
                if any(record.error for record in records) and not stop.is_set():
                    # The end of a process is known a little later than the end of its connections.
                    await asyncio.wait([child.ended for child in children], timeout=0.5, return_when=FIRST_COMPLETED)
                return records

            sides: dict[str, Serve] = {DIRECT: partial(serve, engines), PROXY: partial(serve, [proxy])}
            (measured,) = await run_rounds(sides, [workload], stop=stop, on_run=lambda _, side: _announce(notes, side))
            for number, (side, records) in enumerate(measured.items(), 1):
                interrupted = stop.is_set() and number == len(measured)
                live[side] = plan.document(records, time_scale=plan.speed, interrupted=interrupted)
            if stop.is_set():
                raise await _why_stopped(children)


def _announce(notes: Console, side: str) -> None:
    if side == DIRECT:
        _tell(notes, 1, "straight to the engines, in turn")
    else:
        _tell(notes, 2, "through the proxy")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, _T], children: Sequence[Child]) -> _T:
    """Do ``work`` unless ``stop`` is set before it is done."""
    loop = asyncio.get_running_loop()
    task, stopped = loop.create_task(work, name="start"), loop.create_task(stop.wait(), name="stop")
    await asyncio.wait((task, stopped), return_when=FIRST_COMPLETED)
    for each in (task, stopped):
        each.cancel()
    await asyncio.wait((task, stopped))
    if task.cancelled():
        raise await _why_stopped(children)
    return task.result()


async def _why_stopped(children: Sequence[Child]) -> Exception:
    for child in children:
        if child.ended.done():
            return await child.failure()
    return _InterruptedError()


@contextmanager
def _stop_on_signals() -> Iterator[asyncio.Event]:
    """Give an event that is set by Ctrl-C and by its like, for as long as there is something to clean up."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
