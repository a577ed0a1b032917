"""From a trace and what is asked for to a schedule: every request, decided before anything is sent.

Lengths, arrivals, classes, tenants, thinking times and texts are drawn from streams of their own, all of one seed:
changing what one of them is drawn for changes nothing of the others. Two systems compared on one schedule see the same
requests at the same instants, which makes the difference between them several times steadier than either figure.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from loadgen.arrivals import Arrivals, Process, Rate
from loadgen.draws import below, exponential, shuffled, weighted
from loadgen.schedule import Schedule, quantised
from proxy.sim.workload import PAPER_CLASSES, ClassShare, ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadgen.traces import Row, RowTrace

_SEED_BITS = 48
_NEW_NAMES = 1 << 48
"""Added to the names of blocks each time that a trace is gone through again: what is replayed twice is not cached."""

_MOST_REQUESTS = 20_000_000

LONGER = "longer than allowed"
"""Why a row is left out, where longer ones are to be."""


class PlanError(ValueError):
    """What is asked for cannot be planned; the message says why, for the user."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests of one of ``groups`` begin with the same ``tokens`` tokens, as those with the same system prompt do."""

    tokens: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    rate: Rate | None = None
    """Of requests, or of conversations where ``sessions`` is set; none for a trace's own times and a closed loop."""
    concurrency: int | None = None
    """So many users, each of whom sends the next request when the answer to the last one has ended."""
    requests: int | None = None
    seconds: float | None = None
    """Whichever comes first ends it; at least one is needed, but for a trace's own times."""
    seed: int = 0
    classes: Sequence[ClassShare] = PAPER_CLASSES
    tenants: Mapping[str, float] = field(default_factory=dict)
    speedup: float = 1.0
    """A trace's own times pass so many times as fast."""
    sessions: bool = False
    """Whether turns of a conversation wait for the answer before, or come as requests of their own."""
    think_seconds: float = 0.0
    """Mean of the exponential time from an answer to the next turn, where the trace does not tell."""
    share: bool = True
    """Whether blocks that a trace names are shared."""
    shared_prefix: SharedPrefix | None = None
    scale_lengths: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    """Of prompt and output together, as a model's context has."""
    drop_longer: bool = False
    """Whether rows over a limit are left out. Otherwise they are cut: each length to its own limit, and then both in
    proportion to that of their sum."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, and how many of its requests had a length clipped."""

    schedule: Schedule
    clipped: int = 0


@dataclass(frozen=True, slots=True)
class _Unit:
    """What arrives together: a request, or the turns of a conversation."""

    rows: tuple[Row, ...]
    round: int


def plan(trace: RowTrace, demand: Demand) -> Plan:
    """Decide every request.

    Raises:
        PlanError: it cannot be done, or there would be no request.
    """
    _check(trace, demand)
    if demand.drop_longer:
        trace = without_longer(trace, demand)
    if demand.concurrency is not None:
        requests = _closed(trace, demand, demand.concurrency)
    elif demand.arrivals.process is Process.TRACE:
        requests = _at_own_times(trace, demand)
    else:
        requests = _drawn(trace, demand)
    if demand.seconds is not None:
        requests = (r for r in requests if r.at_seconds < (demand.seconds or inf))
    # One more than allowed, so that it shows.
    found = list(islice(requests, demand.requests or _MOST_REQUESTS + 1))
    if not found:
        raise PlanError("no request comes in the time allowed")
    if len(found) > _MOST_REQUESTS:
        raise PlanError(f"more than {_MOST_REQUESTS:,} requests; ask for fewer, or for a part of the trace")
    finished, clipped = _finished(found, demand)
    return Plan(Schedule(tuple(finished), _origin(trace, demand)), clipped)


def without_longer(trace: RowTrace, demand: Demand) -> RowTrace:
    """Leave out the rows that are over a limit; a turn that follows one of them follows the one before it.

    Raises:
        PlanError: none is left.
    """
    kept: list[Row] = []
    places: list[int | None] = []
    for row in trace.rows:
        before = None if row.after is None else places[row.after]
        if _clip(*_scaled(row.prompt_tokens, row.output_tokens, demand), demand)[1]:
            places.append(before)
        else:
            places.append(len(kept))
            kept.append(row if before == row.after else replace(row, after=before))
    if not kept:
        raise PlanError("every row of the trace is longer than allowed")
    longer = len(trace.rows) - len(kept)
    if not longer:
        return trace
    if trace.emitted != len(trace.rows):  # they were drawn, and are no rows of the file
        note = f"{longer} of the requests drawn are {LONGER} and left out"
        return replace(trace, rows=tuple(kept), notes=(*trace.notes, note))
    dropped = trace.dropped + Counter({LONGER: longer})
    return replace(trace, rows=tuple(kept), emitted=len(kept), dropped=dropped)


def _scaled(prompt: int, output: int, demand: Demand) -> tuple[int, int]:
    return max(1, round(prompt * demand.scale_lengths)), max(1, round(output * demand.scale_lengths))


def _clip(prompt: int, output: int, demand: Demand) -> tuple[tuple[int, int], bool]:
    """Return the lengths within their limits, and whether one was over."""
    kept = min(prompt, demand.max_prompt_tokens or prompt), min(output, demand.max_output_tokens or output)
    if demand.max_total_tokens and (total := sum(kept)) > demand.max_total_tokens:
        cut = max(1, kept[0] * demand.max_total_tokens // total)
        kept = cut, max(1, demand.max_total_tokens - cut)
    return kept, kept != (prompt, output)


def _check(trace: RowTrace, demand: Demand) -> None:
    if abs(sum(c.share for c in demand.classes) - 1) > 1e-6:
        raise PlanError("the shares of the classes must not be negative and add up to 1")
    if demand.arrivals.process is Process.TRACE and demand.concurrency is None:
        if not trace.timed:
            raise PlanError(f"{trace.name} ({trace.format}) has no times of its own: give a --rate or a --concurrency")
        if demand.rate is not None:
            raise PlanError("a trace's own times have a rate of their own: change it by --speedup")
        return
    if demand.rate is None and demand.concurrency is None:
        raise PlanError("these arrivals need a rate")
    if demand.requests is None and demand.seconds is None:
        raise PlanError("say how many --requests, or for how many --seconds")
    if demand.concurrency is not None and (demand.rate is not None or demand.requests is None):
        raise PlanError("a closed loop needs a number of requests and has no rate: it goes as fast as it is answered")


def _drawn(trace: RowTrace, demand: Demand) -> Iterator[ScheduledRequest]:
    """Yield requests at drawn times, in order; every tenant has streams of its own."""
    parts = demand.tenants or {"": 1.0}
    whole = sum(parts.values())
    streams = [_tenant(trace, demand, name, part / whole) for name, part in parts.items()]
    ends = demand.seconds or inf
    number = count()
    for unit in heapq.merge(*streams, key=lambda u: u[0].at_seconds):
        if unit[0].at_seconds >= ends:
            return
        first = next(number)
        for place, request in enumerate(unit):
            index = first if place == 0 else next(number)
            yield replace(request, index=index, after=None if place == 0 else index - 1)


def _tenant(trace: RowTrace, demand: Demand, tenant: str, part: float) -> Iterator[list[ScheduledRequest]]:
    assert demand.rate is not None
    draw = _Streams(demand, tenant)
    for at, unit in zip(demand.arrivals.unit_times(draw.arrivals), _units(trace, demand, draw.lengths), strict=False):
        yield draw.requests(unit, quantised(demand.rate.time_of(at / part)), tenant)


def _closed(trace: RowTrace, demand: Demand, users: int) -> Iterator[ScheduledRequest]:
    """Yield the requests of so many users, each of whom goes through a list of their own."""
    draw = _Streams(demand, "")
    last: list[int | None] = [None] * users
    number = count()
    for place, unit in enumerate(_units(trace, demand, draw.lengths)):
        user = place % users
        for turn, request in enumerate(draw.requests(unit, 0.0, draw.tenant())):
            index = next(number)
            think = request.think_seconds if turn or last[user] is None else draw.think()
            yield replace(request, index=index, after=last[user], think_seconds=think)
            last[user] = index


def _at_own_times(trace: RowTrace, demand: Demand) -> Iterator[ScheduledRequest]:
    """Yield the trace's requests at their own times; a turn comes at its own time, but not before the answer before."""
    draw = _Streams(demand, "")
    whose: dict[str, tuple[ClassShare, str]] = {}
    for index, row in enumerate(trace.rows):
        owner = whose.get(row.session) if demand.sessions and row.session else None
        if owner is None:
            owner = draw.kind(), draw.tenant()
            if row.session:
                whose[row.session] = owner
        kind, tenant = owner
        yield _request(
            row,
            0,
            demand,
            index=index,
            at_seconds=quantised((row.time_s or 0.0) / demand.speedup),
            request_class=kind.request_class,
            content_seed=draw.seed(),
            tenant=tenant,
            after=row.after if demand.sessions else None,
            prefix=draw.prefix(),
        )


def _units(trace: RowTrace, demand: Demand, rng: Random) -> Iterator[_Unit]:
    """Yield what arrives together, again and again in another order."""
    if demand.sessions:
        conversations: dict[str, list[Row]] = defaultdict(list)
        for number, row in enumerate(trace.rows):
            conversations[row.session or f" {number}"].append(row)
        units = [tuple(rows) for rows in conversations.values()]
    else:
        units = [(row,) for row in trace.rows]
    # Where prompts share what others said before them, the trace's own order says who was first.
    ordered = demand.share and any(r.blocks for r in trace.rows)
    for turn in count():
        for unit in units if ordered else shuffled(rng, units):
            yield _Unit(unit, turn)


class _Streams:
    """The streams of one tenant."""

    def __init__(self, demand: Demand, tenant: str) -> None:
        name = f"{demand.seed}:{tenant}" if tenant else f"{demand.seed}"
        self._demand = demand
        self._tenants = sorted(demand.tenants.items())
        self.arrivals, self.lengths, self._classes, self._content, self._thinks, self._prefixes, self._owners = (
            Random(f"{name}:{stream}")
            for stream in ("arrivals", "lengths", "classes", "content", "thinks", "prefixes", "tenants")
        )

    def kind(self) -> ClassShare:
        return self._demand.classes[weighted(self._classes, [c.share for c in self._demand.classes])]

    def tenant(self) -> str:
        if not self._tenants:
            return ""
        return self._tenants[weighted(self._owners, [part for _, part in self._tenants])][0]

    def seed(self) -> int:
        return below(self._content, 1 << _SEED_BITS)

    def think(self) -> float:
        mean = self._demand.think_seconds
        return quantised(mean * exponential(self._thinks)) if mean else 0.0

    def prefix(self) -> str:
        shared = self._demand.shared_prefix
        return "" if shared is None else f"{self._demand.seed}:{below(self._prefixes, shared.groups)}"

    def requests(self, unit: _Unit, at_seconds: float, tenant: str) -> list[ScheduledRequest]:
        """Return the requests of a unit that arrives ``at_seconds``; of their indices, only the order is right."""
        kind, prefix = self.kind(), self.prefix()
        seed = self.seed() if self._demand.sessions else 0
        return [
            _request(
                row,
                unit.round,
                self._demand,
                index=place,
                at_seconds=at_seconds,
                request_class=kind.request_class,
                content_seed=seed if row.grows and self._demand.sessions else self.seed(),
                tenant=tenant,
                think_seconds=0.0 if place == 0 else self.think() if row.think_s is None else quantised(row.think_s),
                prefix=prefix,
            )
            for place, row in enumerate(unit.rows)
        ]


def _request(row: Row, turn: int, demand: Demand, *, prefix: str, **more: Any) -> ScheduledRequest:
    blocks = row.blocks if demand.share else ()
    session = row.session if demand.sessions else ""
    return ScheduledRequest(
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        blocks=tuple(name + turn * _NEW_NAMES for name in blocks) if turn else blocks,
        block_tokens=row.block_tokens if blocks else 0,
        session=f"{session}.{turn}" if session and turn else session,
        prefix="" if blocks else prefix,
        **more,
    )


def _finished(requests: Sequence[ScheduledRequest], demand: Demand) -> tuple[list[ScheduledRequest], int]:
    """Scale and clip the lengths; return how many were clipped, too."""
    finished, clipped = list[ScheduledRequest](), 0
    scale = demand.scale_lengths
    for request in requests:
        scaled = _scaled(request.prompt_tokens, request.output_tokens, demand)
        block = request.block_tokens and max(1, round(request.block_tokens * scale))
        kept, over = _clip(*scaled, demand)
        clipped += over
        blocks = request.blocks[: -(-kept[0] // block)] if block else ()
        # At least one token of every prompt is its own, as it is in any conversation.
        shared = min(demand.shared_prefix.tokens, kept[0] - 1) if demand.shared_prefix and request.prefix else 0
        finished.append(
            replace(
                request,
                prompt_tokens=kept[0],
                output_tokens=kept[1],
                blocks=blocks,
                block_tokens=block if blocks else 0,
                prefix=request.prefix if shared else "",
                prefix_tokens=shared,
            )
        )
    return finished, clipped


def _origin(trace: RowTrace, demand: Demand) -> dict[str, Any]:
    return {
        "trace": {
            "name": trace.name,
            "format": trace.format.value,
            "sha256": trace.sha256,
            "rows_read": trace.rows_read,
            "rows_dropped": dict(trace.dropped),
        },
        "arrivals": "closed loop" if demand.concurrency else str(demand.arrivals),
        "rate": str(demand.rate) if demand.rate else None,
        "concurrency": demand.concurrency,
        "seed": demand.seed,
        "speedup": demand.speedup,
        "sessions": demand.sessions,
    }
