"""The scheduler's state as plain values: what it believes of each engine, who waits, and what each waits for.

Made on demand, for people; the time that it takes grows with the queues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.core.admission import fits_kv
from proxy.core.codec import encode
from proxy.core.rad import sequences_for
from proxy.core.release import urgency
from proxy.core.tbt import harm_seconds, slack_seconds
from proxy.core.tiles import next_piece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.config import SchedulerConfig
    from proxy.core.engine import EngineBelief, EngineLimits
    from proxy.core.ledger import Entry
    from proxy.core.queue import Waiting, WaitingQueue
    from proxy.core.request import Request
    from proxy.core.scheduler import Scheduler
    from proxy.core.stepmodel import OnlineStepModel, StepCoefficients

_MOST_MODELS = 20


@dataclass(frozen=True, slots=True)
class StepModelView:
    """What an engine's steps are taken to last."""

    steps: int
    trusted: bool
    error_mean_seconds: float
    error_p95_seconds: float
    coefficients: StepCoefficients


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is believed of an engine. Tokens and seconds."""

    id: str
    up: bool
    back_off_seconds: float | None
    """Time until anything is released to it again; ``None`` if it has turned nothing away lately."""
    models: list[str]
    """The first of those that it serves; empty: any."""
    limits: EngineLimits
    requests: int
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


@dataclass(frozen=True, slots=True)
class WaitView:
    """A request that waits, wholly or for the rest of its prompt."""

    request_id: str
    request_class: str
    prompt_tokens: int
    wait_seconds: float
    key: float
    overdue: bool
    """It has waited so long that it goes before all that have not, whatever their keys."""
    ahead: int
    """Requests before it in its queue."""
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
    config: dict[str, Any]


def view_state(scheduler: Scheduler, now: float) -> StateView:
    """Return everything, with the head of every queue."""
    return StateView(
        scheduler.draining,
        scheduler.waiting,
        scheduler.waiting_tokens,
        scheduler.waiting_bytes,
        scheduler.dispatched,
        [_view_engine(engine, scheduler.config, now) for engine in scheduler.engines],
        [_view_queue(scheduler, servers, queue, now) for servers, queue in scheduler.ledger.backlog.queues()],
        encode(scheduler.config),
    )


def view_waiting(scheduler: Scheduler, request_id: str, now: float) -> WaitView | None:
    """Return what a request waits for; ``None`` if it does not wait."""
    ledger, config = scheduler.ledger, scheduler.config
    entry = ledger.entries.get(request_id)
    if entry is None or (entry.engine is not None and not entry.sliced):
        return None
    waiting = entry.waiting
    if entry.engine is not None:
        engines, others = [entry.engine], []
    else:
        servers = ledger.backlog.servers_of(waiting)
        engines = [engine for engine in scheduler.engines if engine.id in servers]
        others = [w for found, queue in ledger.backlog.queues() if found == servers for w in queue]
    own = urgency(waiting, config, now), waiting.number
    ahead = sum((urgency(w, config, now), w.number) < own for w in others)
    return WaitView(
        request_id,
        waiting.request.request_class.name,
        waiting.request.prompt_tokens,
        now - waiting.arrived_at,
        waiting.key,
        _overdue(waiting, config, now),
        ahead,
        entry.engine.held_tokens(request_id) if entry.engine is not None else 0,
        {engine.id: _in_its_way(entry, engine, ahead, config, now) for engine in engines},
    )


def shut_gates(engine: EngineBelief, request: Request, config: SchedulerConfig, now: float) -> list[str]:
    """Say why a prompt that is next in the order is not released to ``engine`` whole; empty if it would be."""
    if not engine.up:
        return ["the engine is down"]
    if engine.closed_until is not None and now < engine.closed_until:
        return [f"the engine turned a request away: nothing more for {engine.closed_until - now:.2f} s"]
    if not engine.outstanding:
        return []
    gate, shut = config.gate, list[str]()
    if engine.outstanding >= engine.limits.max_num_seqs:
        shut.append(f"slots: {engine.outstanding} requests of at most {engine.limits.max_num_seqs}")
    backlog_limit = gate.backlog_factor * engine.lead_tokens()
    if config.tiles is None and engine.backlog >= backlog_limit:
        shut.append(f"backlog: {engine.backlog} prompt tokens before it, the gate opens below {backlog_limit:.0f}")
    if config.rad is not None and engine.outstanding >= (most := sequences_for(engine, config.rad.room_share)):
        shut.append(f"throughput mode: {engine.outstanding} requests, it has room again below {most}")
    if not fits_kv(engine, request.prompt_tokens, gate):
        shut.append(
            f"KV cache: {engine.kv_tokens} of {engine.limits.kv_tokens} tokens in use or promised, and reserves; "
            f"it needs {request.prompt_tokens}"
        )
    if gate.keep_tbt and (harm := harm_seconds(engine, request.prompt_tokens, now)) > 0:
        shut.append(f"TBT: it would overrun the deadlines in flight by {harm:.3f} s in all")
    return shut


def _in_its_way(entry: Entry, engine: EngineBelief, ahead: int, config: SchedulerConfig, now: float) -> list[str]:
    request, tiles = entry.waiting.request, config.tiles
    reasons = shut_gates(engine, request, config, now)
    if not reasons and tiles is not None and engine.outstanding:
        upto = next_piece(engine, request, now, tiles, config.gate, sliceable=entry.sliceable)
        if not upto:
            reasons.append("tile: the next step has no room left for a piece of it")
        elif entry.sliced and entry.sliced_in == engine.step:
            reasons.append("tile: its last slice is in this step")
        elif upto < request.prompt_tokens and not entry.sliced and engine.sliced >= tiles.max_sliced:
            reasons.append(f"tiles: {engine.sliced} prompts are half-way already")
    if ahead:
        reasons.append(f"order: {ahead} requests go before it")
    return reasons or ["order: others go before it"]


def _overdue(waiting: Waiting, config: SchedulerConfig, now: float) -> bool:
    return now - waiting.arrived_at >= config.max_wait_seconds


def _view_queue(scheduler: Scheduler, servers: Iterable[str], queue: WaitingQueue, now: float) -> QueueView:
    head = view_waiting(scheduler, queue.head(now).request.id, now)
    assert head is not None
    tokens = sum(waiting.request.prompt_tokens for waiting in queue)
    return QueueView(sorted(servers), len(queue), tokens, now - queue.oldest.arrived_at, head)


def _view_engine(engine: EngineBelief, config: SchedulerConfig, now: float) -> EngineView:
    closed_until = engine.closed_until
    return EngineView(
        engine.id,
        engine.up,
        None if closed_until is None else max(0.0, closed_until - now),
        sorted(engine.models)[:_MOST_MODELS],
        engine.limits,
        engine.outstanding,
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
    )


def _view_model(model: OnlineStepModel) -> StepModelView:
    return StepModelView(
        model.steps, model.trusted, model.error_mean_seconds, model.error_p95_seconds, model.coefficients
    )
