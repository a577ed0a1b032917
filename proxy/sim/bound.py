"""How many requests per second an engine can serve at most, whatever its scheduler, and what keeps it from more.

A request needs its prompt tokens computed, its decodes made and their context read. Over a long time ``n`` steps go by
for each request that is served, so a step has on average ``1/n`` of a request's needs in it; at least as many that

* its tokens fit the token budget:      ``n >= (E[prompt] + E[decodes]) / token_budget``,
* its streams fit the slots:            ``n >= E[decodes] / max_num_seqs``,
* its context fits the KV cache:        ``n >= E[context read] / kv_tokens``.

Attention, context and streams cost what they cost, in whatever steps they are. What remains of a step, ``g(tokens)``,
is at least its lower convex envelope, so all steps alike are best (Jensen); and since a token costs less in a larger
step, the fewest steps are:

    requests per second  <=  1 / (n * g(tokens / n) + attention + context + streams)   at the least n.

With steps that cost whole tiles, ``g`` is a staircase: its envelope runs through the whole tiles, and a mix of two
kinds of steps reaches it, as RAD's two modes do. With ``g`` linear and no limit but tiles this is the bound of the SLAI
paper (Theorem 1); with a constant part and no memory that of Dai et al. (2504.07347). Prefix caching, preemption and
the wait for arrivals are left out: the first can lift the bound, the others only lower what is reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proxy.sim.engine import EngineConfig
    from proxy.sim.profiles import StepModel
    from proxy.sim.workload import Lengths

_FEWEST_STEPS = 1e-6
"""For a request, where nothing limits a step."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request needs on average. Tokens."""

    prompt_tokens: float
    decodes: float
    """Its output but the first token, which its prompt makes."""
    kv_tokens: float
    """Context read, added up over its decodes."""
    attention: float
    """As in ``StepModel``, added up over its prompt."""

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.decodes

    @classmethod
    def of(cls, lengths: Iterable[Lengths]) -> Needs:
        """Average over a trace.

        Raises:
            ValueError: it is empty.
        """
        sums = [0.0] * 4
        count = 0
        for count, size in enumerate(lengths, 1):  # noqa: B007 - the last is how many there are
            prompt, decodes = size.prompt_tokens, size.output_tokens - 1
            sums[0] += prompt
            sums[1] += decodes
            sums[2] += prompt * decodes + decodes * (decodes - 1) / 2
            sums[3] += prompt * prompt / 2
        if not count:
            raise ValueError("there are no requests whose needs could be averaged")
        return cls(*(s / count for s in sums))


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can have in a step; infinity is no limit."""

    token_budget: float
    max_num_seqs: float
    kv_tokens: float

    @classmethod
    def of(cls, config: EngineConfig) -> Limits:
        return cls(config.token_budget, config.max_num_seqs, config.blocks * config.block_size)

    def steps(self, needs: Needs) -> dict[str, float]:
        """The least steps for a request, by what asks for them."""
        return {
            "token budget": needs.tokens / self.token_budget,
            "sequence slots": needs.decodes / self.max_num_seqs,
            "KV cache": needs.kv_tokens / self.kv_tokens,
        }


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of one engine, and the average step with which it is reached."""

    requests_per_second: float
    binds: str
    """What would have to be larger for more: token budget, sequence slots or KV cache."""
    step_seconds: float
    prompt_tokens: float
    decodes: float
    kv_tokens: float
    alone: dict[str, float]
    """Requests per second if each limit were the only one."""


def bound(model: StepModel, limits: Limits, needs: Needs) -> Bound:
    """Return what an engine with such steps and limits can serve at most."""
    asked = limits.steps(needs)
    binding = max(asked, key=asked.__getitem__)
    steps = max(asked[binding], _FEWEST_STEPS)
    seconds = _seconds(model, needs, steps)
    return Bound(
        1 / seconds,
        binding,
        seconds / steps,
        needs.prompt_tokens / steps,
        needs.decodes / steps,
        needs.kv_tokens / steps,
        {name: 1 / _seconds(model, needs, max(least, _FEWEST_STEPS)) for name, least in asked.items()},
    )


def with_budget(limits: Limits, token_budget: int) -> Limits:
    return Limits(token_budget, limits.max_num_seqs, limits.kv_tokens)


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """What one token budget allows."""

    token_budget: int
    bound: Bound
    full_step_seconds: float
    """A step of the whole budget at the bound's streams, its prompt tokens deep inside a long prompt."""
    keeps: float | None
    """The tightest TBT deadline that it keeps is kept with this to spare, in seconds; negative: broken by so much."""


def budgets(
    model: StepModel, limits: Limits, lengths: Sequence[Lengths], tile: int, tbt_seconds: float | None
) -> list[BudgetRow]:
    """Return the bound at each token budget: the powers of two of ``tile``, and three halves of them, up to 8,192."""
    needs, deep = Needs.of(lengths), depth_of_prompts(lengths)
    sizes = sorted({n for k in range(14) for n in (tile << k, tile * 3 << k >> 1) if n <= 8192 and n % tile == 0})
    rows = []
    for size in sizes:
        if size < min(limits.max_num_seqs, 8192):
            continue  # a step must hold one token of every stream
        found = bound(model, with_budget(limits, size), needs)
        prompt_tokens = size - min(found.decodes, size)
        full = model.seconds(
            prefill_tokens=round(prompt_tokens),
            sequences=round(found.decodes) + 1,
            decodes=round(found.decodes),
            kv_tokens=round(found.kv_tokens),
            attention=prompt_tokens * deep,
        )
        rows.append(BudgetRow(size, found, full, None if tbt_seconds is None else tbt_seconds - full))
    return rows


def best_budget(rows: Sequence[BudgetRow], *, within_tbt: bool, nearly: float = 0.99) -> BudgetRow | None:
    """The smallest budget whose bound is nearly the best one; ``None``: none keeps the deadline."""
    fit = [row for row in rows if not within_tbt or row.keeps is None or row.keeps >= 0]
    if not fit:
        return None
    most = max(row.bound.requests_per_second for row in fit)
    return next(row for row in fit if row.bound.requests_per_second >= nearly * most)


def depth_of_prompts(lengths: Sequence[Lengths], share: float = 0.95) -> float:
    """How many tokens of its prompt come before a prompt token, for all but 5 % of prompt tokens."""
    total = sum(size.prompt_tokens for size in lengths)
    sizes = [*sorted((size.prompt_tokens for size in lengths), reverse=True), 0]
    # Tokens deeper than h: the sum over prompts of what each has beyond h.
    beyond, above = 0, sizes[0]
    for longer, size in enumerate(sizes):
        step = longer * (above - size)
        if beyond + step > (1 - share) * total:
            return above - ((1 - share) * total - beyond) / longer
        beyond += step
        above = size
    return 0.0


def _seconds(model: StepModel, needs: Needs, steps: float) -> float:
    """Seconds of a request's needs in so many steps, by the lower convex envelope of what tokens cost."""
    linear = model.per_decode * needs.decodes + model.per_kv_token * needs.kv_tokens
    linear += model.per_attention * needs.attention
    # Each stream is a sequence; of prompts there is at least a share of one in a step.
    linear += model.host_per_sequence * needs.decodes
    return 1e-3 * (linear + steps * (model.host + _envelope(model, needs.tokens / steps)))


def _envelope(model: StepModel, tokens: float) -> float:
    """Milliseconds of the roofline at so many tokens a step, on average over steps of whole tiles."""
    if model.tile == 1:
        return _roofline(model, tokens)
    tokens = max(tokens, model.tile)  # a step with anything in it costs a tile
    below = tokens // model.tile * model.tile
    share = (tokens - below) / model.tile
    return (1 - share) * _roofline(model, below) + share * _roofline(model, below + model.tile)


def _roofline(model: StepModel, tokens: float) -> float:
    milliseconds: float = (model.floor**model.p + (model.per_token * tokens) ** model.p) ** (1 / model.p)
    return milliseconds
