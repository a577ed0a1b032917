"""Limits of tenants in a simulation: ``core.quota``, as the live proxy applies it to an API key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.quota import Quota, QuotaLease, QuotaLimits, QuotaRefusal
from proxy.sim.workload import parse_tenants

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.sim.workload import ScheduledRequest


class Quotas:
    """A key for each tenant that has a limit: so many tokens (prompt and output) a minute."""

    def __init__(self, tokens_per_minute: Mapping[str, int]) -> None:
        self._quotas = {
            tenant: Quota(QuotaLimits(tokens_per_minute=tokens), 0.0) for tenant, tokens in tokens_per_minute.items()
        }
        self._leases: dict[int, tuple[Quota, QuotaLease]] = {}

    def begin(self, request: ScheduledRequest, now: float) -> QuotaRefusal | None:
        """Let a request in, or say why not. How long its answer gets nobody knows: it has no ``max_tokens``."""
        quota = self._quotas.get(request.tenant)
        if quota is None:
            return None
        lease = quota.begin(now)
        refusal = lease if isinstance(lease, QuotaRefusal) else quota.reserve(lease, request.prompt_tokens, None, now)
        if isinstance(lease, QuotaLease):
            if refusal is None:
                self._leases[request.index] = quota, lease
            else:
                quota.end(lease, now)
        return refusal

    def end(self, request: ScheduledRequest, output_tokens: int, now: float) -> None:
        """Settle a request that is over; one without any output was refused, and pays nothing."""
        quota, lease = self._leases.pop(request.index, (None, None))
        if quota is not None and lease is not None:
            quota.end(
                lease, now, prompt_tokens=request.prompt_tokens if output_tokens else 0, output_tokens=output_tokens
            )


def parse_tokens(text: str) -> dict[str, int]:
    """Read ``NAME=TOKENS[,NAME=TOKENS]``: tokens in a minute, by tenant.

    Raises:
        ValueError: the text has another form, names one twice, or a number is not whole and positive.
    """
    try:
        parts = parse_tenants(text)
    except ValueError:
        parts = {}
    if not parts or not all(part.is_integer() for part in parts.values()):
        raise ValueError(
            f"what tenants get is NAME=TOKENS[,NAME=TOKENS], whole numbers of tokens a minute, not {text!r}"
        )
    return {name: int(part) for name, part in parts.items()}
