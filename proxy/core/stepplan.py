"""What the next step of an engine is to hold, for a scheduler that sits inside it.

A proxy decides which prompts an engine gets; inside, every step can be composed anew: which decodes run, how many
prompt tokens go with them, and whose. Three rules, each a function of what is there now:

- ``Slai``: the paper's practical scheduler (arXiv 2508.01002, section 5, eq. 8). A decode waits until its last
  schedulable time as long as prompts have work; prompts go shortest first.
- ``Rad``: its throughput-optimal one (Algorithm 1). Full tiles of the oldest prompts while sequences may join, else
  decodes alone. It knows no deadlines.
- ``Deadline``: ours. The prompt tokens of a step are as many as the tightest deadline allows by a step model learnt on
  the way; they go to whoever has the least left to do; decodes wait where that wins something.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from proxy.core.stepmodel import StepLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.core.stepmodel import OnlineStepModel

_KV_NEARLY_FULL = 0.96
"""Share of the KV cache in use from which SLAI lets decodes run earlier, as its code has it."""
_KV_PRESSURE = 0.9
"""Share from which ``Deadline`` holds no decode back: what runs must end for others to begin."""
_OFFSETS = 5, 10
"""Mean steps before its deadline from which a decode must run: usually, and with a cache that is nearly full."""
_YOUNG_STEPS = 32
"""Steps of which a step model knows too little to fill one up to a deadline by it."""
_WORTH = 0.05
"""Share by which holding decodes back must enlarge a step's prompt tokens to be done."""
_CLOCK_SECONDS = 0.002
"""What a step may take longer than any model can know."""
_MOSTLY = 0.75
_DUE_AT = itemgetter(1)
"""Of a ``Decode``."""


class Decode(NamedTuple):
    """A sequence that generates."""

    id: str
    due_at: float
    """When its next token is due: the last one's time plus its TBT deadline."""
    context: int
    """Tokens in the KV cache."""
    tokens: int = 1
    """That a step works on; more than one with speculative decoding."""


class Prompt(NamedTuple):
    """A sequence that has prompt tokens left to work on."""

    id: str
    remaining: int
    computed: int
    arrived_at: float
    rank: int = 0
    """Engine's priority: lower goes first, whatever the length."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the next step can be made of."""

    now: float
    token_budget: int
    """Most tokens that a step may hold."""
    decodes: Sequence[Decode]
    begun: Sequence[Prompt]
    """Prompts half-way, in order of admission: they hold KV cache."""
    waiting: Sequence[Prompt]
    """In the engine's own order."""
    free_slots: int
    """Sequences that may still be admitted."""
    free_tokens: int
    """KV cache that prompts to be admitted may take; each must fit whole."""
    kv_usage: float = 0.0
    mean_step_seconds: float = 0.02
    steps_ahead: int = 0
    """Steps composed before the tokens of the last are known: with asynchronous scheduling 1."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do differently from the engine's own scheduler in one step."""

    token_budget: int
    held: frozenset[str] = frozenset()
    """Sequences that sit this step out."""
    order: Sequence[str] | None = None
    """Of those that wait; ``None``: as it is."""
    chunk_tokens: int = 0
    """Most tokens of one prompt; 0: no limit."""
    admits: bool = True
    """Whether those that wait may be taken in."""


class StepPolicy(Protocol):
    """Plans steps."""

    def plan(self, state: EngineState) -> StepPlan:
        """Return what the next step is to be."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """Shortest first, with exponential aging: ``aging_seconds`` of waiting count as much as being e times shorter.

    The order of two prompts never changes while they wait, so nobody who comes later than ``aging_seconds *
    ln(own length)`` after a prompt can overtake it: that bounds how long it can be passed over.
    """

    aging_seconds: float | None = 4.0

    def __call__(self, prompt: Prompt) -> tuple[int, float, float]:
        aged = 0.0 if self.aging_seconds is None else prompt.arrived_at / self.aging_seconds
        return prompt.rank, log(max(1, prompt.remaining)) + aged, prompt.arrived_at


@dataclass(frozen=True, slots=True)
class Slai:
    """See the module's docstring. ``order`` without aging is the paper's."""

    order: Order = field(default_factory=Order)

    def plan(self, state: EngineState) -> StepPlan:
        ordered = sorted(state.waiting, key=self.order)
        ready = sum(p.remaining for p in state.begun) + sum(p.remaining for p in admissible(state, ordered))
        held: frozenset[str] = frozenset()
        if ready:
            offset = _OFFSETS[state.kv_usage >= _KV_NEARLY_FULL] + state.steps_ahead
            runs_by = state.now + offset * state.mean_step_seconds
            critical = sum(d.tokens for d in state.decodes if d.due_at <= runs_by)
            others = sorted((d for d in state.decodes if d.due_at > runs_by), key=lambda d: d.due_at)
            held = _beyond(others, state.token_budget - critical - ready)
        return StepPlan(state.token_budget, held, [p.id for p in ordered])


@dataclass(frozen=True, slots=True)
class Rad:
    """See the module's docstring.

    ``tile_tokens``: the least common multiple of the kernels' tile sizes; ``most_decodes``: its columns' tile.
    """

    tile_tokens: int = 512
    most_decodes: int = 128

    def plan(self, state: EngineState) -> StepPlan:
        oldest_first = sorted(state.waiting, key=lambda p: (p.rank, p.arrived_at))
        if len(state.decodes) >= self.most_decodes or not (state.begun or admissible(state, oldest_first)):
            return StepPlan(state.token_budget, frozenset(p.id for p in state.begun), admits=False)
        held = frozenset(d.id for d in state.decodes)
        return StepPlan(min(self.tile_tokens, state.token_budget), held, [p.id for p in oldest_first])


@dataclass(frozen=True, slots=True)
class Deadline:
    """See the module's docstring.

    ``model``: of this engine, and taught by whoever runs the steps.
    ``least_tokens``: prompt tokens that a step takes however tight the deadlines are, so that prompts go on.
    """

    model: OnlineStepModel
    order: Order = field(default_factory=Order)
    least_tokens: int = 128
    young_tokens: int = 256

    def plan(self, state: EngineState) -> StepPlan:
        ordered = sorted(state.waiting, key=self.order)
        entering = admissible(state, ordered)
        names = [p.id for p in ordered]
        ready = sum(p.remaining for p in state.begun) + sum(p.remaining for p in entering)
        if not ready:
            return StepPlan(state.token_budget, order=names)
        held: frozenset[str] = frozenset()
        prompts = sorted([*state.begun, *entering], key=self.order)
        everybody = running = _added_up(state.decodes)
        tokens = self._fitting(state, everybody, prompts)
        if tokens < ready and state.kv_usage < _KV_PRESSURE and self.model.steps >= _YOUNG_STEPS:
            patient = self._patient(state, _filled(everybody, prompts, tokens))
            if patient:
                hurried = _added_up(d for d in state.decodes if d.id not in patient)
                enlarged = self._fitting(state, hurried, prompts)
                if enlarged >= (1 + _WORTH) * tokens:
                    held, tokens, running = patient, enlarged, hurried
                    if tokens > ready:  # not all of them have to wait for that
                        held, tokens = self._fewest(state, patient, prompts, ready), ready
                        running = _added_up(d for d in state.decodes if d.id not in held)
        while True:
            passed, chunk = self._pass(state, entering, tokens)
            # The engine's order is another one than that by which the tokens were counted.
            served = [p for p in state.begun if p.id not in passed] + entering
            fitting = self._fitting(state, running, served, chunk)
            if fitting >= tokens:
                break
            tokens = min(fitting, tokens - tokens // 64)  # by steps that end soon
        return StepPlan(min(state.token_budget, running.tokens + tokens), held | passed, names, chunk)

    def _fewest(
        self, state: EngineState, patient: frozenset[str], prompts: Sequence[Prompt], tokens: int
    ) -> frozenset[str]:
        """Of the decodes that can wait those that have to, for so many prompt tokens to fit: who is due last."""
        running = [d for d in state.decodes if d.id not in patient]
        others = sorted((d for d in state.decodes if d.id in patient), key=lambda d: d.due_at)
        low, high = 0, len(others)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fitting(state, _added_up(running + others[:middle]), prompts) >= tokens:
                low = middle
            else:
                high = middle - 1
        return frozenset(d.id for d in others[low:])

    def _fitting(self, state: EngineState, decodes: _Sum, prompts: Sequence[Prompt], chunk: int = 0) -> int:
        """Tokens of these prompts, in this order, that may go with these decodes for every one of all to be in time."""
        most = state.token_budget - decodes.tokens
        least = max(1, min(self.least_tokens, most))
        if not state.decodes:
            return max(1, most)
        if self.model.steps < _YOUNG_STEPS:
            return max(least, min(self.young_tokens, most))
        # A step composed ahead ends one step later than the clock now says.
        seconds = min(map(_DUE_AT, state.decodes)) - state.now
        base = StepLoad(0, decodes.number, decodes.context)
        seconds -= state.steps_ahead * self.model.predict(base)
        seconds = min(seconds - _CLOCK_SECONDS, seconds / (1.0 + self.model.prompt_errors.p99))
        return max(least, min(most, self._tokens_within(seconds, base, prompts, chunk)))

    def _tokens_within(self, seconds: float, load: StepLoad, prompts: Sequence[Prompt], chunk: int) -> int:
        """Tokens of these prompts, one after another, for a step to last so long: late ones of a prompt cost more."""
        total = 0
        for prompt in prompts:
            wanted = min(prompt.remaining, chunk or prompt.remaining)
            tokens = min(wanted, self.model.prefill_tokens_within(seconds, load, prompt.computed))
            total += tokens
            if tokens < wanted:
                return total
            attention = load.attention + tokens * (prompt.computed + tokens / 2)
            load = load._replace(
                prefill_tokens=load.prefill_tokens + tokens, attention=attention, prefills=load.prefills + 1
            )
        return total + self.model.prefill_tokens_within(seconds, load, 0)

    def _patient(self, state: EngineState, load: StepLoad) -> frozenset[str]:
        """The decodes whose tokens are still in time if they run in the step after this one, and both are so full."""
        two_steps = (2 + state.steps_ahead) * (self.model.predict(load) + self.model.margin_seconds(load))
        return frozenset(d.id for d in state.decodes if d.due_at - state.now > two_steps)

    def _pass(self, state: EngineState, entering: Sequence[Prompt], tokens: int) -> tuple[frozenset[str], int]:
        """Let prompts that wait pass those half-way that have more left: who sits out, and how much one may take.

        An engine serves those half-way first, each with as much as fits. A limit on what one prompt may take leaves
        room for the others; where they need most of the step, those half-way sit it out.
        """
        if not state.begun:
            return frozenset(), 0
        by_order = sorted(state.begun, key=self.order)
        first = self.order(by_order[0])
        passing = [p for p in entering if self.order(p) < first]
        if not passing:
            return _share(by_order, tokens)
        wanted = sum(p.remaining for p in passing)
        if wanted >= _MOSTLY * tokens:
            return frozenset(p.id for p in state.begun), 0
        return frozenset(p.id for p in by_order[1:]), max(tokens - wanted, *(p.remaining for p in passing))


class _Sum(NamedTuple):
    """Some decodes, added up."""

    number: int
    tokens: int
    context: int


def _added_up(decodes: Iterable[Decode]) -> _Sum:
    number = tokens = context = 0
    for _, _, of_one, worked_on in decodes:
        number += 1
        tokens += worked_on
        context += of_one
    return _Sum(number, tokens, context)


def _filled(decodes: _Sum, prompts: Iterable[Prompt], tokens: int) -> StepLoad:
    """A step with so many tokens of these prompts, in this order, or of all."""
    taken = prefills = 0
    attention = 0.0
    for prompt in prompts:
        if taken >= tokens:
            break
        part = min(prompt.remaining, tokens - taken)
        attention += part * (prompt.computed + part / 2)
        taken, prefills = taken + part, prefills + 1
    return StepLoad(taken, decodes.number, decodes.context, attention, prefills)


def admissible(state: EngineState, ordered: Iterable[Prompt]) -> list[Prompt]:
    """Return the waiting prompts that the step could take in: as slots, KV cache and the token budget go."""
    room, tokens, entering = state.free_tokens, state.token_budget, list[Prompt]()
    for prompt in ordered:
        if len(entering) >= state.free_slots or tokens <= 0 or prompt.remaining > room:
            break
        room -= prompt.remaining
        tokens -= prompt.remaining
        entering.append(prompt)
    return entering


def _share(by_order: Sequence[Prompt], tokens: int) -> tuple[frozenset[str], int]:
    """Let prompts half-way take no more than so many tokens together: who sits out, and how much one may take (0: all).

    An engine gives what a step holds to those that run in order of their admission: a prompt would take the share of
    the decodes behind it as well.
    """
    left, longest = tokens, 0
    for index, prompt in enumerate(by_order):
        if prompt.remaining > left:
            goes_on = left >= longest  # else the limit would cut those before it short
            return frozenset(p.id for p in by_order[index + goes_on :]), left if goes_on else 0
        left -= prompt.remaining
        longest = max(longest, prompt.remaining)
    return frozenset(), 0


def _beyond(decodes: Iterable[Decode], tokens: int) -> frozenset[str]:
    """Return those for which ``tokens`` do not suffice, in their order."""
    held = []
    for decode in decodes:
        tokens -= decode.tokens
        if tokens < 0:
            held.append(decode.id)
    return frozenset(held)
