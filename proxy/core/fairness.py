"""Fair shares of an engine pool: between classes of different weight, and between tenants inside each.

Every flow has a counter of the tokens that it was served, divided by its weight; of those that wait, the one with the
lowest counter goes next (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024;
the clock is that of start-time fair queueing: Goyal et al., SIGCOMM 1996). Prompt tokens count when they are released,
output tokens when the request ends, and until then as many as the flow's answers usually have.

A tenant may be guaranteed a rate (``guarantee``). What it uses of that goes before all turns, and does not count as its
share: what is left is what tenants share.

Bound: of two flows that both wait all the time, neither is served more than ``credit + p1 / w1 + p2 / w2`` tokens per
unit of weight beyond the other, where ``p`` is the most that one release of the flow is charged and ``credit`` what the
pool serves per unit of weight in ``2 * credit_seconds``. While outputs are not what was expected, their error adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.counters import Counter, Level
from proxy.core.guarantee import Guarantees
from proxy.core.occupancy import Occupancy

if TYPE_CHECKING:
    from collections.abc import Mapping

OUTPUT_PRICE = 2.0
"""What an output token counts, in prompt tokens: it is worked on in a step of its own, and holds its KV cache."""
CREDIT_SECONDS = 10.0
"""How far back a flow may claim what it left unused."""
REMEMBERED_FLOWS = 1024
"""Flows without a waiting request whose counters are kept; beyond, the one that is idle longest is forgotten."""


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
    guarantee_left: float
    """The part of its tenant's guarantee that is not used (see ``Guarantees.left``)."""
    expected_output_tokens: float
    kv_tokens: float
    """What its requests in flight are said to hold."""


class FairShares:
    """The counters of one pool of engines: a level of class weights, and under each weight one of tenants."""

    def __init__(
        self,
        tenant_weights: Mapping[str, float] | None = None,
        guaranteed: Mapping[str, int] | None = None,
        *,
        credit_seconds: float = CREDIT_SECONDS,
        remembered: int = REMEMBERED_FLOWS,
    ) -> None:
        self._tenant_weights = tenant_weights or {}
        self._guarantees = Guarantees(guaranteed)
        self._limits = credit_seconds, remembered
        self._classes: Level[float] = Level(*self._limits)
        self._occupancy = Occupancy()
        self._tenants: dict[float, Level[str]] = {}  # by class weight, of which there are as many as are configured

    def reweigh(self, tenant_weights: Mapping[str, float], guaranteed: Mapping[str, int], now: float) -> None:
        """Share by other weights and guarantees from now on; what was served by those before stays as it is."""
        self._tenant_weights = tenant_weights
        self._guarantees.change(guaranteed, now)
        for level in self._tenants.values():
            level.reweigh(lambda tenant: tenant_weights.get(tenant, 1.0))

    def enter(self, flow: Flow) -> None:
        """Note that the flow has a waiting request and had none before."""
        weight, tenant = flow
        level = self._tenants.get(weight)
        if level is None:
            level = self._tenants[weight] = Level(*self._limits)
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

    def first(self, now: float) -> Flow:
        """The flow that goes next; some flow must wait."""
        guaranteed = [
            (-left, self._classes.turn(weight), level.turn(tenant), Flow(weight, tenant))
            for tenant in self._guarantees
            if (left := self._guarantees.left(tenant, now)) > 0
            for weight, level in self._tenants.items()
            if level.waits(tenant)
        ]
        if guaranteed:
            return min(guaranteed)[-1]
        weight = self._classes.first()
        return Flow(weight, self._tenants[weight].first())

    def is_guaranteed(self, flow: Flow, now: float) -> bool:
        """Whether what the flow has released now is within what its tenant is guaranteed."""
        return self._guarantees.left(flow.tenant, now) > 0

    def ahead(self, flow: Flow, now: float) -> tuple[float, float]:
        """As ``Bill.ahead`` for a request of the flow that goes next, which is not charged yet."""
        return self._guarantees.ahead(flow.tenant, now) if self.is_guaranteed(flow, now) else (0.0, 0.0)

    def accounts(self, now: float) -> list[FlowAccount]:
        """Return all that are remembered: first those that wait, in the order of their turns."""

        def turn(account: tuple[Counter[float], Counter[str]]) -> tuple[float, ...]:
            c, t = account
            guaranteed = max(0.0, self._guarantees.left(t.key, now))
            return not t.waiting, -guaranteed, c.served, c.number, t.served, t.number

        found = [(c, t) for c in self._classes.counters() for t in self._tenants[c.key].counters()]
        found.sort(key=turn)
        return [
            FlowAccount(
                c.key,
                t.key,
                t.waiting,
                c.served,
                t.served,
                self._guarantees.left(t.key, now),
                t.expected_output,
                self._occupancy.held(Flow(c.key, t.key)),
            )
            for c, t in found
        ]

    def share_of(self, flow: Flow) -> float:
        """The part of all service that is the flow's while it waits beside those that wait now."""
        weight, tenant = flow
        level = self._tenants.get(weight)
        of_class = 1.0 if level is None else level.share(tenant, self._tenant_weights.get(tenant, 1.0))
        return of_class * self._classes.share(weight, weight)

    def open_bill(self, flow: Flow, now: float) -> Bill:
        """Begin to charge a request of the flow, which must have entered before."""
        guarantees = self._guarantees if self.is_guaranteed(flow, now) else None
        return Bill(self._classes, self._tenants[flow.class_weight], self._occupancy, flow, guarantees)

    def bypass(self, flow: Flow, now: float) -> Bill:
        """As ``enter``, ``open_bill`` and ``leave`` at once, where no flow waits."""
        weight, tenant = flow
        level = self._tenants.get(weight)
        if level is None:
            level = self._tenants[weight] = Level(*self._limits)
        self._classes.bypass(weight, weight)
        level.bypass(tenant, self._tenant_weights.get(tenant, 1.0))
        self._occupancy.know(flow)
        return self.open_bill(flow, now)

    def kept_from(self, flow: Flow, now: float) -> float:
        """Tokens of KV cache that a release of this flow has to leave free, for those whose turn may come."""
        return 0.0 if self.is_guaranteed(flow, now) else self._occupancy.kept_for_others(flow)


class Bill:
    """What one request is charged, from its release to its end: to what its tenant is guaranteed, or to its share."""

    __slots__ = (
        "_classes",
        "_flow",
        "_guarantees",
        "_held",
        "_occupancy",
        "_output_tokens",
        "_prompt_tokens",
        "_tenants",
    )

    def __init__(
        self,
        classes: Level[float],
        tenants: Level[str],
        occupancy: Occupancy,
        flow: Flow,
        guarantees: Guarantees | None,
    ) -> None:
        self._classes = classes
        self._tenants = tenants
        self._occupancy = occupancy
        self._guarantees = guarantees
        self._held = 0.0
        self._flow = flow
        self._prompt_tokens = 0
        self._output_tokens = 0.0

    def charge(self, prompt_tokens: int, now: float, *, last: bool) -> None:
        """Charge the prompt up to ``prompt_tokens``; with the ``last`` of it, the output as it may be expected."""
        prompt = prompt_tokens - self._prompt_tokens
        self._prompt_tokens = prompt_tokens
        if last:
            self._output_tokens = self._tenants.expected_output(self._flow.tenant)
            self._held = prompt_tokens + self._output_tokens
            self._occupancy.take(self._flow, self._held, now)
        tokens = prompt + OUTPUT_PRICE * self._output_tokens
        self._classes.charge(self._flow.class_weight, tokens, now)
        if self._guarantees is None:
            self._tenants.charge(self._flow.tenant, tokens, now)
        else:
            self._guarantees.use(self._flow.tenant, prompt + self._output_tokens, now)

    def settle(self, output_tokens: int) -> None:
        """The request has ended after so many tokens of output."""
        self._correct(0, output_tokens - self._output_tokens)
        self._output_tokens = float(output_tokens)
        self._give_back()
        if output_tokens:
            self._tenants.learn_output(self._flow.tenant, output_tokens)

    def cancel(self) -> None:
        """The request goes back to the queue: whatever was done of it is nobody's gain."""
        self._correct(-self._prompt_tokens, -self._output_tokens)
        self._prompt_tokens, self._output_tokens = 0, 0.0
        self._give_back()

    def _give_back(self) -> None:
        self._occupancy.give(self._flow, self._held)
        self._held = 0.0

    def ahead(self, now: float) -> tuple[float, float]:
        """How far the request's class, and its tenant inside it, are ahead of who goes next of those that wait.

        What is guaranteed has its turn before all.
        """
        if self._guarantees is not None:
            return self._guarantees.ahead(self._flow.tenant, now)
        return self._classes.ahead(self._flow.class_weight), self._tenants.ahead(self._flow.tenant)

    def _correct(self, prompt_tokens: int, output_tokens: float) -> None:
        tokens = prompt_tokens + OUTPUT_PRICE * output_tokens
        self._classes.correct(self._flow.class_weight, tokens)
        if self._guarantees is None:
            self._tenants.correct(self._flow.tenant, tokens)
        else:
            self._guarantees.correct(self._flow.tenant, prompt_tokens + output_tokens)
