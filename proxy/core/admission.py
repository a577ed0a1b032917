"""The gate: may this engine be given this prompt now?

Released prompts are beyond our control, so nothing is released before the engine can use it; and an engine that runs
dry loses throughput, so nothing is held that it could have begun. Between the two lies one engine step of work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.engine import EngineBelief


@dataclass(frozen=True, slots=True)
class GateConfig:
    """When to release. The defaults need no tuning; they follow from an engine step, not from a load."""

    backlog_factor: float = 1.5
    """Release while the engine's backlog stays below this many times what it works through until it hears from us.

    At 1 the last chunk of a prompt often leaves a part of its step's budget unused, at 2 the order is already the
    engine's own for a step longer than needed.
    """
    feedback_seconds: float = 0.005
    """Delay of the loop: a token on its way here, and a prompt on its way back."""
    keep_tbt: bool = False
    """Whether to spare the TBT deadlines of streams in flight (``tbt``)."""
    kv_watermark: float = 0.03
    """Share of the KV cache that stays free, as long as output lengths are unknown or the engine tells nothing."""
    kv_growth_tokens: int = 64
    """Further tokens of KV cache kept for each sequence, until enough outputs have ended to forecast their growth."""
    tenant_headroom: float = 0.3
    """Share of an engine's KV cache and of its slots that a tenant with a queue leaves free while others have none."""

    def __post_init__(self) -> None:
        if not self.backlog_factor > 0 or not 0 <= self.feedback_seconds < inf or self.kv_growth_tokens < 0:
            raise ValueError("backlog_factor must be positive, feedback_seconds and kv_growth_tokens not negative")
        if not 0 <= self.kv_watermark < 1 or not 0 <= self.tenant_headroom < 1:
            raise ValueError("kv_watermark and tenant_headroom lie in [0, 1)")


def admits(engine: EngineBelief, prompt_tokens: int, gate: GateConfig, now: float) -> bool:
    """Whether ``engine`` can be given a prompt of ``prompt_tokens`` at ``now``.

    An engine without work always can: whatever our estimates say, nothing waits for an idle engine.
    """
    if not engine.is_open(now):
        return False
    if not engine.outstanding:
        return True
    return (
        not engine.is_full
        and (engine.backlog < gate.backlog_factor * engine.lead_tokens() or engine.would_begin(prompt_tokens))
        and fits_kv(engine, prompt_tokens, gate)
    )


def is_shut(engine: EngineBelief, gate: GateConfig, now: float) -> bool:
    """Whether ``admits`` says no to whatever prompt it is asked for."""
    if not engine.is_open(now):
        return True
    if not engine.outstanding:
        return False
    if engine.is_full:
        return True
    return engine.backlog >= gate.backlog_factor * engine.lead_tokens() and not engine.lets_short_pass


def leaves_free(engine: EngineBelief, prompt_tokens: int, kept_tokens: float, gate: GateConfig) -> bool:
    """Whether ``kept_tokens`` of KV cache, but never more than half of it, stay free for others after this prompt.

    If anything is kept, the head-room stays free too. It is not for what others hold: the fuller an engine is, the
    longer are its steps, and the fewer tokens of a newcomer's prompt does each work on.
    """
    if not kept_tokens or not engine.outstanding:
        return True
    limits, growth = engine.limits, gate.kv_growth_tokens * (1 + engine.outstanding)
    if engine.outstanding >= (1 - gate.tenant_headroom) * limits.max_num_seqs:
        return False
    if limits.kv_tokens is None:
        return True
    kept = max(min(kept_tokens, limits.kv_tokens / 2), gate.tenant_headroom * limits.kv_tokens)
    return prompt_tokens + kept <= (1 - gate.kv_watermark) * limits.kv_tokens - growth - engine.kv_tokens


def fits_kv(engine: EngineBelief, prompt_tokens: int, gate: GateConfig) -> bool:
    """Whether the KV cache has room for ``prompt_tokens`` more, and for the growth of what runs."""
    capacity = engine.limits.kv_tokens
    if capacity is None or prompt_tokens > capacity:
        return True  # the engine has to refuse what is too long, and does so at once
    reports = engine.reports
    usable = (1 - reports.caution) * capacity
    if not reports.fresh:  # nobody would tell of an error in our account
        usable -= gate.kv_watermark * capacity
    if engine.outputs.learnt:
        fits, alone = engine.has_kv_room(prompt_tokens, usable), prompt_tokens
    else:
        usable = min(usable, (1 - gate.kv_watermark) * capacity)
        alone = prompt_tokens + gate.kv_growth_tokens
        growth = gate.kv_growth_tokens * engine.outstanding
        fits = engine.kv_tokens + reports.kv_error + growth + alone <= usable
    return fits or (alone > usable and engine.kv_tokens + prompt_tokens <= capacity)  # without reserves, but with room
