"""Headers that tell a client what is left of its limits, by the names and in the units of OpenAI's API."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.quota import Remaining


def rate_limit_headers(requests: Remaining | None, tokens: Remaining | None) -> dict[str, str]:
    """Return ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``, those of limits that there are."""
    headers: dict[str, str] = {}
    for what, left in (("requests", requests), ("tokens", tokens)):
        if left is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(left.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(left.remaining)
            headers[f"x-ratelimit-reset-{what}"] = duration(left.reset_seconds)
    return headers


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: ``12ms``, ``1.5s``, ``6m0s``, rounded up to a whole millisecond."""
    milliseconds = max(0, ceil(seconds * 1000 - 1e-6))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    told = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{told}" if minutes else told
