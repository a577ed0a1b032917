"""The rules that a scheduler works by."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from proxy.core.admission import GateConfig
from proxy.core.health import HealthConfig
from proxy.core.ordering import AGING_SECONDS, Ordering, shortest_prompt_first

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.core.rad import RadConfig
    from proxy.core.tiles import TileConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Rules of the queue. All durations are seconds."""

    ordering: Ordering = field(default_factory=lambda: shortest_prompt_first(AGING_SECONDS))
    gate: GateConfig = field(default_factory=GateConfig)
    tiles: TileConfig | None = None
    """How to cut prompts into tiles; ``None``: they are released whole, by the gate."""
    rad: RadConfig | None = None
    """Throughput mode: how full to keep the engines; ``None``: as full as the gate lets them be."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """When an engine is taken out."""
    max_wait_seconds: float = 60.0
    """A request that has waited this long goes before all others."""
    queue_timeout_seconds: float = 300.0
    """A request that has waited this long is refused."""
    max_queue_requests: int = 10_000
    max_queue_tokens: int | None = None
    """Prompt tokens of waiting requests; ``None``: what can be served before ``queue_timeout_seconds``."""
    max_queue_bytes: int = 512 << 20
    """Bodies of waiting requests held in memory."""
    no_engine_retry_seconds: float = 5.0
    """What a client is told to wait when no engine is up."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Shares of the engines, by tenant; 1 for those not named."""
    tenant_guarantees: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Tokens a minute, prompt and output, by tenant: up to these its work goes first (see ``guarantee``)."""

    def __post_init__(self) -> None:
        durations = self.max_wait_seconds, self.queue_timeout_seconds, self.no_engine_retry_seconds
        if not all(0 < seconds < inf for seconds in durations):
            raise ValueError("durations must be positive and finite")
        if min(self.max_queue_requests, self.max_queue_tokens or 0, self.max_queue_bytes) < 0:
            raise ValueError("queue limits must not be negative")
        if self.tiles is not None and self.rad is not None:
            raise ValueError("throughput mode (rad) releases whole prompts: it does not go together with tiles")
        if not all(0 < weight < inf for weight in self.tenant_weights.values()):
            raise ValueError("tenants' weights must be positive and finite")
        if not all(tokens >= 1 for tokens in self.tenant_guarantees.values()):
            raise ValueError("what tenants are guaranteed must be at least 1 token a minute")
