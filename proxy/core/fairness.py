"""Fair shares of an engine pool: between classes of different weight, and between tenants inside each.

Every flow has a counter of the tokens that it was served, divided by its weight; of those that wait, the one with the
lowest counter goes next (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024;
the clock is that of start-time fair queueing: Goyal et al., SIGCOMM 1996). Prompt tokens count when they are released,
output tokens when the request ends, and until then as many as the flow's answers usually have.

Bound: of two flows that both wait all the time, neither is served more than ``credit + p1 / w1 + p2 / w2`` tokens per
unit of weight beyond the other, where ``p`` is the most that one release of the flow is charged and ``credit`` what the
pool serves per unit of weight in ``2 * credit_seconds``. While outputs are not what was expected, their error adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from proxy.core.heap import Heap
from proxy.core.occupancy import Occupancy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

_Key = TypeVar("_Key", bound="Hashable")

OUTPUT_PRICE = 2.0
"""What an output token counts, in prompt tokens: it is worked on in a step of its own, and holds its KV cache."""
CREDIT_SECONDS = 10.0
"""How far back a flow may claim what it left unused."""
REMEMBERED_FLOWS = 1024
"""Flows without a waiting request whose counters are kept; beyond, the one that is idle longest is forgotten."""
_EXPECTED_WEIGHT = 0.1


class Flow(NamedTuple):
    """Whose share a request comes out of."""

    class_weight: float = 1.0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class FlowAccount:
    """What a flow was given, to look at. Tokens served are per unit of weight, and begin where the others were."""

    class_weight: float
    tenant: str
    waits: bool
    class_served: float
    """By all tenants, to classes of this weight."""
    tenant_served: float
    expected_output_tokens: float
    kv_tokens: float
    """What its requests in flight are said to hold."""


@dataclass(slots=True)
class _Counter(Generic[_Key]):
    key: _Key
    weight: float
    served: float
    """Tokens charged, per unit of weight."""
    number: int
    """Order of appearance; breaks ties."""
    waiting: bool = False
    expected_output: float = 0.0
    """Moving average of its answers' lengths, in tokens."""


class _Level(Generic[_Key]):
    """The counters of flows that share directly with each other; O(log n) for every change."""

    def __init__(self, credit_seconds: float, remembered: int) -> None:
        self._credit_seconds = credit_seconds
        self._remembered = remembered
        self._counters: dict[_Key, _Counter[_Key]] = {}
        self._waiting: Heap[_Counter[_Key]] = Heap(lambda c: (c.served, c.number))
        self._idle: dict[_Key, None] = {}  # idle longest first
        self._waiting_weight = 0.0
        self._number = 0
        self._clock = 0.0  # the highest counter that anything was released at: those who wait have about this much
        # The clock at the start of this span of credit_seconds, and of the one before.
        self._span_began_at = 0.0
        self._mark = self._earlier_mark = 0.0

    def __len__(self) -> int:
        """How many flows wait."""
        return len(self._waiting)

    def counters(self) -> Iterable[_Counter[_Key]]:
        """All that are remembered."""
        return self._counters.values()

    def reweigh(self, weight_of: Callable[[_Key], float]) -> None:
        """Give every flow another weight; nobody's counter changes by that."""
        for counter in self._counters.values():
            counter.weight = weight_of(counter.key)
        self._waiting_weight = sum(counter.weight for counter in self._waiting)

    def enter(self, key: _Key, weight: float) -> None:
        """A flow begins to wait. What it left unused long ago is forgiven, and a new one begins where the others are.

        A newcomer gets no credit: or making up names would pay.
        """
        counter = self._counters.get(key)
        if counter is None:
            self._number += 1
            counter = self._counters[key] = _Counter(key, weight, self._clock, self._number)
        self._idle.pop(key, None)
        counter.served = max(counter.served, self._earlier_mark)
        counter.waiting = True
        self._waiting.add(counter)
        self._waiting_weight += counter.weight

    def leave(self, key: _Key) -> None:
        counter = self._counters[key]
        self._waiting.remove(counter)
        self._waiting_weight = self._waiting_weight - counter.weight if self._waiting else 0.0  # no error stays
        counter.waiting = False
        self._idle[key] = None
        if len(self._idle) > self._remembered:
            forgotten = next(iter(self._idle))
            del self._idle[forgotten], self._counters[forgotten]

    def share(self, key: _Key, weight: float) -> float:
        """The part that is the flow's, of all that wait and itself."""
        counter = self._counters.get(key)
        others = 0.0 if counter is not None and counter.waiting else weight
        return weight / (self._waiting_weight + others)

    def first(self) -> _Key:
        return self._waiting.first.key

    def charge(self, key: _Key, tokens: float, now: float) -> None:
        counter = self._counters.get(key)
        if counter is None:
            return  # forgotten: it was idle for longer than a thousand others
        if now - self._span_began_at >= self._credit_seconds:
            long_ago = now - self._span_began_at >= 2 * self._credit_seconds
            self._earlier_mark = self._clock if long_ago else self._mark
            self._mark, self._span_began_at = self._clock, now
        self._clock = max(self._clock, counter.served)
        self.correct(key, tokens)

    def correct(self, key: _Key, tokens: float) -> None:
        """Change a counter without a release: what was charged before was too little, or (negative) too much."""
        counter = self._counters.get(key)
        if counter is None:
            return
        if counter.waiting:
            self._waiting.remove(counter)
        counter.served += tokens / counter.weight
        if counter.waiting:
            self._waiting.add(counter)

    def expected_output(self, key: _Key) -> float:
        counter = self._counters.get(key)
        return counter.expected_output if counter is not None else 0.0

    def learn_output(self, key: _Key, tokens: int) -> None:
        counter = self._counters.get(key)
        if counter is not None:
            known = counter.expected_output
            counter.expected_output += (_EXPECTED_WEIGHT if known else 1.0) * (tokens - known)

    def ahead(self, key: _Key) -> float:
        """How much more the flow was served than the one that goes next, per unit of weight."""
        counter = self._counters.get(key)
        return counter.served - self._waiting.first.served if counter is not None and self._waiting else 0.0


class FairShares:
    """The counters of one pool of engines: a level of class weights, and under each weight one of tenants."""

    def __init__(
        self,
        tenant_weights: Mapping[str, float] | None = None,
        *,
        credit_seconds: float = CREDIT_SECONDS,
        remembered: int = REMEMBERED_FLOWS,
    ) -> None:
        self._tenant_weights = tenant_weights or {}
        self._limits = credit_seconds, remembered
        self._classes: _Level[float] = _Level(*self._limits)
        self._occupancy = Occupancy()
        self._tenants: dict[float, _Level[str]] = {}  # by class weight, of which there are as many as are configured

    def reweigh(self, tenant_weights: Mapping[str, float]) -> None:
        """Share by other weights from now on; what was served by those before stays as it is."""
        self._tenant_weights = tenant_weights
        for level in self._tenants.values():
            level.reweigh(lambda tenant: tenant_weights.get(tenant, 1.0))

    def enter(self, flow: Flow) -> None:
        """Note that the flow has a waiting request and had none before."""
        weight, tenant = flow
        level = self._tenants.get(weight)
        if level is None:
            level = self._tenants[weight] = _Level(*self._limits)
        if not len(level):
            self._classes.enter(weight, weight)
        level.enter(tenant, self._tenant_weights.get(tenant, 1.0))
        self._occupancy.wait(flow, waiting=True)

    def leave(self, flow: Flow) -> None:
        """Note that the flow has no waiting request any more."""
        weight, tenant = flow
        level = self._tenants[weight]
        level.leave(tenant)
        if not len(level):
            self._classes.leave(weight)
        self._occupancy.wait(flow, waiting=False)

    def first(self) -> Flow:
        """The flow that goes next; some flow must wait."""
        weight = self._classes.first()
        return Flow(weight, self._tenants[weight].first())

    def accounts(self) -> list[FlowAccount]:
        """Return all that are remembered: first those that wait, in the order of their turns."""
        found = [(c, t) for c in self._classes.counters() for t in self._tenants[c.key].counters()]
        found.sort(key=lambda ct: (not ct[1].waiting, ct[0].served, ct[0].number, ct[1].served, ct[1].number))
        return [
            FlowAccount(
                c.key, t.key, t.waiting, c.served, t.served, t.expected_output, self._occupancy.held(Flow(c.key, t.key))
            )
            for c, t in found
        ]

    def share_of(self, flow: Flow) -> float:
        """The part of all service that is the flow's while it waits beside those that wait now."""
        weight, tenant = flow
        level = self._tenants.get(weight)
        of_class = 1.0 if level is None else level.share(tenant, self._tenant_weights.get(tenant, 1.0))
        return of_class * self._classes.share(weight, weight)

    def open_bill(self, flow: Flow) -> Bill:
        """Begin to charge a request of the flow, which must have entered before."""
        return Bill(self._classes, self._tenants[flow.class_weight], self._occupancy, flow)

    def kept_from(self, flow: Flow) -> float:
        """Tokens of KV cache that a release of this flow has to leave free, for those whose turn may come."""
        return self._occupancy.kept_for_others(flow)


class Bill:
    """What one request is charged, from its release to its end."""

    __slots__ = ("_classes", "_flow", "_held", "_occupancy", "_output_tokens", "_prompt_tokens", "_tenants")

    def __init__(self, classes: _Level[float], tenants: _Level[str], occupancy: Occupancy, flow: Flow) -> None:
        self._classes = classes
        self._tenants = tenants
        self._occupancy = occupancy
        self._held = 0.0
        self._flow = flow
        self._prompt_tokens = 0
        self._output_tokens = 0.0

    def charge(self, prompt_tokens: int, now: float, *, last: bool) -> None:
        """Charge the prompt up to ``prompt_tokens``; with the ``last`` of it, the output as it may be expected."""
        tokens = float(prompt_tokens - self._prompt_tokens)
        self._prompt_tokens = prompt_tokens
        if last:
            self._output_tokens = self._tenants.expected_output(self._flow.tenant)
            tokens += OUTPUT_PRICE * self._output_tokens
            self._held = prompt_tokens + self._output_tokens
            self._occupancy.take(self._flow, self._held, now)
        self._classes.charge(self._flow.class_weight, tokens, now)
        self._tenants.charge(self._flow.tenant, tokens, now)

    def settle(self, output_tokens: int) -> None:
        """The request has ended after so many tokens of output."""
        self._correct(OUTPUT_PRICE * (output_tokens - self._output_tokens))
        self._output_tokens = output_tokens
        self._give_back()
        if output_tokens:
            self._tenants.learn_output(self._flow.tenant, output_tokens)

    def cancel(self) -> None:
        """The request goes back to the queue: whatever was done of it is nobody's gain."""
        self._correct(-(self._prompt_tokens + OUTPUT_PRICE * self._output_tokens))
        self._prompt_tokens, self._output_tokens = 0, 0.0
        self._give_back()

    def _give_back(self) -> None:
        self._occupancy.give(self._flow, self._held)
        self._held = 0.0

    def ahead(self) -> tuple[float, float]:
        """How far the request's class, and its tenant inside it, are ahead of who goes next of those that wait."""
        return self._classes.ahead(self._flow.class_weight), self._tenants.ahead(self._flow.tenant)

    def _correct(self, tokens: float) -> None:
        self._classes.correct(self._flow.class_weight, tokens)
        self._tenants.correct(self._flow.tenant, tokens)
