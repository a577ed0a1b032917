"""What is read when somebody asks: the scheduler's beliefs, and whatever parts of the proxy count themselves."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from proxy.core.health import Condition
from proxy.core.reasons import Obstacle, Reasons
from proxy.core.stepmodel import StepCoefficients
from proxy.core.tbt import slack_seconds
from proxy.telemetry.metrics.names import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from proxy.core.engine import EngineBelief
    from proxy.core.promptsize import PromptSizes, RateFit
    from proxy.core.scheduler import Scheduler

    Read = Callable[[], Iterable[tuple[tuple[str, ...], float]]]


class Readings:
    """Metrics that are read where their values are."""

    def __init__(self) -> None:
        self._read: dict[Name, tuple[Read, bool]] = {}

    def watch(self, name: Name, read: Read, *, counts: bool = False) -> None:
        """Take in a metric; ``counts``: it only grows."""
        self._read[name] = read, counts

    def names(self) -> Iterable[Name]:
        """All that there are by now."""
        return self._read

    def collect(self) -> Iterator[Metric]:
        """Read all of them."""
        for name, (read, counts) in self._read.items():
            yield name.family(read(), counts=counts)


def watch_scheduler(readings: Readings, scheduler: Scheduler) -> None:
    """Show what the scheduler believes."""

    def gauge(name: str, description: str, read: Callable[[], float], unit: str = "") -> None:
        readings.watch(Name(name, description, unit), lambda: [((), read())])

    gauge("slai.queue.requests", "Requests that wait", lambda: scheduler.waiting)
    gauge("slai.queue.tokens", "Prompt tokens that wait", lambda: scheduler.waiting_tokens)
    gauge(
        "slai.queue.outflow.rate",
        "Tokens released per second while some wait",
        lambda: scheduler.outflow_tokens_per_second,
    )
    gauge("slai.queue.size", "Bodies of waiting requests", lambda: scheduler.waiting_bytes, "By")
    gauge("slai.streams", "Streams past their first token", lambda: sum(e.decodes for e in scheduler.engines))
    turns = scheduler.ledger.turns
    readings.watch(
        Name("slai.queue.turns", "What left the queue, by why it went before those that stayed", labels=("turn",)),
        lambda: [((turn.value,), count) for turn, count in turns.counts.items()],
        counts=True,
    )
    readings.watch(
        Name("slai.queue.overtaking", "By how much those that overtook had come later than the oldest, summed", "s"),
        lambda: [((), turns.overtaking_seconds)],
        counts=True,
    )
    readings.watch(
        Name("slai.release.harmful", "Prompts released although they were to overrun a TBT deadline (policy slai)"),
        lambda: [((), scheduler.harmful_releases)],
        counts=True,
    )
    readings.watch(
        Name("slai.engine.condition", "1 for the condition that it is in", labels=("engine", "condition")),
        lambda: [((e.id, c.value), e.health.condition is c) for e in scheduler.engines for c in Condition],
    )
    readings.watch(
        Name(
            "slai.engine.plugin",
            "1 for the policy by which its own scheduler goes, where that is our plugin",
            labels=("engine", "policy"),
        ),
        lambda: [((e.id, e.plugin.value), 1) for e in scheduler.engines if e.plugin is not None],
    )
    for name, read in _engine_gauges(scheduler):
        readings.watch(name, _of_each(scheduler, read))


def _of_each(scheduler: Scheduler, read: Callable[[EngineBelief], float | None]) -> Read:
    def found() -> Iterator[tuple[tuple[str, ...], float]]:
        for engine in scheduler.engines:
            if (value := read(engine)) is not None:
                yield (engine.id,), value

    return found


def _engine_gauges(scheduler: Scheduler) -> Iterator[tuple[Name, Callable[[EngineBelief], float | None]]]:
    prefixes = scheduler.prefixes

    def gauge(
        name: str, description: str, read: Callable[[EngineBelief], float | None], unit: str = ""
    ) -> tuple[Name, Callable[[EngineBelief], float | None]]:
        return Name(name, description, unit, ("engine",)), read

    yield gauge("slai.engine.up", "1 if the engine gets requests", lambda e: e.up)
    yield gauge("slai.engine.leaving", "1 if removed, and not yet done with what it has", lambda e: e.leaving)
    yield gauge("slai.engine.generation", "Number of its joining, of all", lambda e: e.number)
    yield gauge(
        "slai.engine.ejections", "Times it was left alone, as it failed too often", attrgetter("health.ejections")
    )
    yield gauge("slai.engine.stalls", "Times it gave no token for too long", attrgetter("health.stalls"))
    yield gauge("slai.engine.restarts", "Times it started anew unseen", lambda e: e.restarts)
    yield gauge("slai.engine.requests", "Requests dispatched and not over", lambda e: e.outstanding)
    yield gauge("slai.engine.passing", "Requests past the queue (no generation)", lambda e: e.passing)
    yield gauge("slai.engine.decodes", "Streams past their first token", lambda e: e.decodes)
    yield gauge("slai.engine.backlog.tokens", "Released prompt tokens not worked on yet", lambda e: e.backlog)
    yield gauge("slai.engine.kv.tokens", "KV cache in use, as we count it", lambda e: e.kv_tokens)
    yield gauge("slai.engine.kv.capacity.tokens", "KV cache; 0 unknown", lambda e: e.limits.kv_tokens or 0)
    yield gauge(
        "slai.engine.prefix.tokens", "Prompt tokens believed cached by it", lambda e: prefixes.index(e.id).tokens
    )
    yield gauge(
        "slai.engine.prefix.trust", "Share of them that it finds, 1 unheard", lambda e: prefixes.index(e.id).trust
    )
    yield gauge(
        "slai.engine.kv.error.tokens", "KV cache in use beyond our count, by its own", lambda e: e.reports.kv_error
    )
    yield gauge("slai.engine.kv.caution", "Share kept free after preemptions", lambda e: e.reports.caution)
    yield gauge("slai.engine.slice.hit_rate", "Share of earlier slices found cached", lambda e: e.hit_rate.rate)
    yield gauge("slai.engine.foreign.requests", "Sequences that others run on it", lambda e: e.reports.foreign)
    for name, description in (
        ("running", "Sequences that it works on, by its own word"),
        ("waiting", "Sequences that wait in it, by its own word"),
        ("kv_usage", "Share of its KV cache in use, by its own word"),
    ):
        yield gauge(f"slai.engine.reported.{name}", description, partial(_reported, name))
    yield gauge("slai.engine.step.duration", "Usual engine step, as we see it", lambda e: e.step_seconds, "s")
    yield gauge("slai.engine.feedback.duration", "From release to a step", attrgetter("delay.seconds"), "s")
    yield gauge("slai.engine.tbt.slack", "Strictest TBT deadline less step and p95 error", slack_seconds, "s")
    yield gauge("slai.engine.steps.ahead", "Steps that it composes in advance", attrgetter("delay.steps"))
    yield gauge("slai.engine.step.model.steps", "Steps seen that the step model was fitted to", lambda e: e.model.steps)
    yield gauge("slai.engine.step.model.trusted", "1 once the step model is used", lambda e: e.model.trusted)
    for kind in ("prompt", "decode"):
        errors, of = f"slai.engine.step.model.{kind}.error", f"model.{kind}_errors"
        yield gauge(f"{errors}.mean", f"Mean error, share of prediction, {kind}", attrgetter(f"{of}.mean"))
        for rank in ("p95", "p99"):
            yield gauge(
                f"{errors}.{rank}", f"{rank} beyond prediction, share of it, {kind}", attrgetter(f"{of}.{rank}")
            )
    for name in (f.name for f in fields(StepCoefficients)):
        term = attrgetter(f"model.coefficients.{name}")
        yield gauge(f"slai.engine.step.model.{name}", f"Step model: seconds, {name.replace('_', ' ')}", term, "s")


def _reported(name: str, engine: EngineBelief) -> float | None:
    told = engine.reports.told
    return None if told is None else getattr(told, name)


def watch_obstacles(readings: Readings, scheduler: Scheduler, now: Callable[[], float]) -> None:
    """Show why nothing more goes to each engine at ``now()``, while somebody waits for it."""

    def found() -> Iterator[tuple[tuple[str, ...], float]]:
        reasons = Reasons(scheduler, now())
        for engine in scheduler.engines:
            obstacle = reasons.obstacle(engine)
            yield from (((engine.id, o.value), o is obstacle) for o in Obstacle)

    name = "1 for what is first in the way of who is next for it; 0 for all if nobody waits for it"
    readings.watch(Name("slai.engine.obstacle", name, labels=("engine", "reason")), found)


def watch_sizes(readings: Readings, sizes: PromptSizes, known_model: Callable[[str], bool]) -> None:
    """Show what is learnt of prompts' lengths, of the models that engines have."""

    def of_models(read: Callable[[RateFit], Iterable[tuple[tuple[str, ...], float]]]) -> Read:
        return lambda: [
            ((model, *labels), value) for model, fit in sizes if known_model(model) for labels, value in read(fit)
        ]

    readings.watch(
        Name("slai.prompt.bytes_per_token", "Bytes of text that make a token, as learnt", labels=("model", "script")),
        of_models(lambda fit: [(("ascii",), 1 / fit.rates.per_ascii_byte), (("other",), 1 / fit.rates.per_other_byte)]),
    )
    readings.watch(
        Name("slai.prompt.estimate.error", "Mean error of estimated prompt lengths, as a share", labels=("model",)),
        of_models(lambda fit: [((), fit.error)]),
    )
