"""The scheduler's state as plain values: what it believes of each engine, who waits, and what each waits for.

Made on demand, for people; the time that it takes grows with the queues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.core.codec import LONGEST_TEXT, encode
from proxy.core.reasons import Reasons
from proxy.core.tbt import slack_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief
    from proxy.core.fairness import FlowAccount
    from proxy.core.growth import OutputLengths
    from proxy.core.ledger import Entry, Ledger
    from proxy.core.limits import EngineLimits
    from proxy.core.prefix import PrefixIndex
    from proxy.core.queue import WaitingQueue
    from proxy.core.scheduler import Scheduler
    from proxy.core.stepmodel import ErrorFigures, OnlineStepModel, StepCoefficients, StepLoad

_MOST_MODELS = 20
_MOST_FLOWS = 100
"""Shown of each pool; those that wait come first."""


@dataclass(frozen=True, slots=True)
class StepModelView:
    """What an engine's steps are taken to last."""

    steps: int
    trusted: bool
    prompt_errors: ErrorFigures
    """Of steps with prompt tokens."""
    decode_errors: ErrorFigures
    coefficients: StepCoefficients
    past_steps: float
    """How many steps the fit rests on: older ones count less."""
    past_load: StepLoad
    """What was in these, added up."""


@dataclass(frozen=True, slots=True)
class ReportsView:
    """What follows from an engine's own figures."""

    fresh: bool
    """Whether it gives any at present."""
    foreign_requests: int
    kv_error_tokens: float
    """In use beyond those that are accounted for."""
    kv_caution: float
    """Share of its KV cache that stays free because it has had to preempt."""


@dataclass(frozen=True, slots=True)
class PrefixView:
    """What an engine's prefix cache is believed to hold."""

    blocks: int
    tokens: int
    trust: float
    """Share of what was believed to be cached that engines found cached."""


@dataclass(frozen=True, slots=True)
class OutputsView:
    """How long outputs of a kind are."""

    model: str
    request_class: str
    ended: int
    learnt: bool
    mean_tokens: float | None


@dataclass(frozen=True, slots=True)
class SharesView:
    """What each tenant, in each weight of classes, was given of some engines."""

    engines: list[str]
    flows: list[FlowAccount]
    """Those that wait come first, in the order of their turns; not all, if they are many."""
    others: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is believed of an engine. Tokens and seconds."""

    id: str
    up: bool
    leaving: bool
    """It has been removed, and is gone when what it still has is over."""
    generation: int
    """Number of its joining, of all that ever joined: an engine that was gone and came back is another one."""
    condition: str
    """Healthy, slow_start, ejected, probation or stalled; only the first two get all that they can take."""
    ejected_seconds: float | None
    """Time until an ejection is over."""
    ejections: int
    stalls: int
    restarts: int
    back_off_seconds: float | None
    """Time until anything is released to it again; ``None`` if it has turned nothing away lately."""
    models: list[str]
    """The first of those that it serves; empty: any."""
    limits: EngineLimits
    plugin: str | None
    """By which of our rules the engine itself composes its steps, if it has our plugin."""
    requests: int
    passing: int
    """Requests that it was given past the queue."""
    decodes: int
    sliced: int
    """Prompts of which it has a prefix."""
    backlog_tokens: int
    backlog_limit_tokens: float
    """The gate is open below it."""
    kv_tokens: int
    step: int
    step_seconds: float
    feedback_seconds: float
    """From the release of a prompt to when a step can be composed with it."""
    steps_ahead: int
    """By how many it composes its steps before they run."""
    strictest_tbt_seconds: float | None
    slack_seconds: float | None
    """By how much the step under way keeps that deadline, as predicted."""
    step_model: StepModelView
    full_at: int | None
    """In throughput mode: with so many requests it gets no more."""
    reports: ReportsView
    prefixes: PrefixView


@dataclass(frozen=True, slots=True)
class WaitView:
    """A request that waits, wholly or for the rest of its prompt."""

    request_id: str
    request_class: str
    tenant: str
    prompt_tokens: int
    wait_seconds: float
    key: float
    band: str
    """Overdue (goes first, whatever the keys are), urgent (so does a TTFT deadline), ordinary (by key) or hopeless."""
    ttft_seconds_left: float | None
    """Until its first token is due; ``None`` if no time was promised."""
    ahead: int
    """Requests before it among those of its tenant and of classes of its weight."""
    flows_ahead: int
    """Other tenants, or classes of another weight, whose turn it is before."""
    held_tokens: int
    """Of its prompt, sent ahead in slices."""
    waits_for: dict[str, list[str]]
    """For each engine that serves it: what is in its way there."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue: those that the same engines serve."""

    engines: list[str]
    requests: int
    prompt_tokens: int
    oldest_wait_seconds: float
    head: WaitView
    """The request that is released next."""


@dataclass(frozen=True, slots=True)
class StateView:
    """The whole scheduler."""

    draining: bool
    waiting: int
    waiting_tokens: int
    waiting_bytes: int
    dispatched: int
    engines: list[EngineView]
    queues: list[QueueView]
    shares: list[SharesView]
    outputs: list[OutputsView]
    """Of all together, then by model and class."""
    config: dict[str, Any]


def view_state(scheduler: Scheduler, now: float) -> StateView:
    """Return everything, with the head of every queue."""
    ledger, config, reasons = scheduler.ledger, scheduler.config, Reasons(scheduler, now)
    return StateView(
        scheduler.draining,
        scheduler.waiting,
        scheduler.waiting_tokens,
        scheduler.waiting_bytes,
        scheduler.dispatched,
        [_view_engine(engine, ledger, config, now) for engine in scheduler.engines],
        [_view_queue(ledger, servers, queue, reasons, now) for servers, queue in ledger.backlog.queues()],
        [_view_shares(servers, shares.accounts(now)) for servers, shares in ledger.backlog.shares()],
        _view_all_outputs(ledger),
        encode(config),
    )


def view_waiting(scheduler: Scheduler, request_id: str, now: float) -> WaitView | None:
    """Return what a request waits for; ``None`` if it does not wait."""
    entry = scheduler.ledger.entries.get(request_id)
    if entry is None or (entry.engine is not None and not entry.sliced):
        return None
    return _view_entry(scheduler.ledger, entry, Reasons(scheduler, now), now)


def _view_entry(ledger: Ledger, entry: Entry, reasons: Reasons, now: float) -> WaitView:
    waiting, request = entry.waiting, entry.waiting.request
    engines = reasons.engines_of(entry)
    lane = [waiting] if entry.sliced else list(ledger.backlog.queue_of(waiting).lane_of(request))
    band, ahead = reasons.rank(waiting, lane)
    flows_ahead = reasons.flows_ahead(entry)
    order = [f"order: {ahead} requests go before it"] if ahead else []
    turn = [f"turn: {flows_ahead} other tenants or classes go before it"] if flows_ahead else []
    ways = {e.id: [*reasons.against(entry, e, engines), *turn, *order] for e in engines}
    deadline = waiting.ttft_deadline
    return WaitView(
        request.id,
        request.request_class.name,
        request.tenant,
        request.prompt_tokens,
        now - waiting.arrived_at,
        waiting.key,
        band.name.lower(),
        None if deadline is None else deadline - now,
        ahead,
        flows_ahead,
        entry.engine.held_tokens(request.id) if entry.engine is not None else 0,
        {engine_id: way or ["order: others go before it"] for engine_id, way in ways.items()},
    )


def _view_queue(ledger: Ledger, servers: Iterable[str], queue: WaitingQueue, reasons: Reasons, now: float) -> QueueView:
    lane = list(queue.first_lane(now))
    head = min(lane, key=reasons.order_in(lane))
    tokens = sum(waiting.request.prompt_tokens for waiting in queue)
    view = _view_entry(ledger, ledger.entries[head.request.id], reasons, now)
    return QueueView(sorted(servers), len(queue), tokens, now - queue.oldest.arrived_at, view)


def _view_shares(servers: Iterable[str], accounts: list[FlowAccount]) -> SharesView:
    return SharesView(sorted(servers), accounts[:_MOST_FLOWS], len(accounts[_MOST_FLOWS:]))


def _view_all_outputs(ledger: Ledger) -> list[OutputsView]:
    growth = ledger.growth
    kinds = sorted(growth.kinds().items(), key=lambda kind: -kind[1].ended)[:_MOST_MODELS]
    return [
        _view_outputs("", "", growth.pooled),
        *(_view_outputs(model[:LONGEST_TEXT], name, lengths) for (model, name), lengths in kinds),
    ]


def _view_outputs(model: str, class_name: str, lengths: OutputLengths) -> OutputsView:
    return OutputsView(model, class_name, lengths.ended, lengths.learnt, lengths.mean_tokens)


def _view_engine(engine: EngineBelief, ledger: Ledger, config: SchedulerConfig, now: float) -> EngineView:
    closed_until, reports, health = engine.closed_until, engine.reports, engine.health
    return EngineView(
        engine.id,
        engine.up,
        engine.leaving,
        engine.number,
        health.condition.value,
        None if health.until is None else max(0.0, health.until - now),
        health.ejections,
        health.stalls,
        engine.restarts,
        None if closed_until is None else max(0.0, closed_until - now),
        sorted(engine.models)[:_MOST_MODELS],
        engine.limits,
        None if engine.plugin is None else engine.plugin.value,
        engine.outstanding,
        engine.passing,
        engine.decodes,
        engine.sliced,
        engine.backlog,
        config.gate.backlog_factor * engine.lead_tokens(),
        engine.kv_tokens,
        engine.step,
        engine.step_seconds,
        engine.delay.seconds,
        engine.delay.steps,
        engine.strictest_tbt_seconds,
        slack_seconds(engine),
        _view_model(engine.model),
        None if ledger.modes is None else ledger.modes.limit(engine),
        ReportsView(reports.fresh, reports.foreign, reports.kv_error, reports.caution),
        _view_prefixes(ledger.prefixes.index(engine.id)),
    )


def _view_prefixes(index: PrefixIndex) -> PrefixView:
    return PrefixView(len(index), index.tokens, index.trust)


def _view_model(model: OnlineStepModel) -> StepModelView:
    return StepModelView(
        model.steps,
        model.trusted,
        model.prompt_errors.figures(),
        model.decode_errors.figures(),
        model.coefficients,
        model.past_steps,
        model.past_load(),
    )
