"""The entries of settings that are tables, and the kinds of figures in settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
"""From the clock's tick to some thirty years: the times made from it stay exact, and finite."""

Limit = Annotated[int, Field(gt=0, le=10**15)]
"""Longer numbers cannot be reckoned with in floating point."""


class ClassSettings(BaseModel):
    """The deadlines of one request class, in seconds (leave one out to promise nothing), and its weight: classes of
    one weight share the engines as one, those of another weight get that many times as much while both have to wait.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    ttft_seconds: Seconds | None = None
    """Deadline of the first token."""
    tbt_seconds: Seconds | None = None
    """Deadline of each gap between two tokens."""
    weight: Positive = 1.0
    """Its share beside classes of another weight, while both have to wait."""
    ttft_limit_seconds: Seconds | None = None
    """Who cannot have a first token so soon is refused (503), at once if that can be told."""


class TenantSettings(BaseModel):
    """One tenant: its share of the engines beside other tenants, what it is guaranteed of them, and its API keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weight: Positive = 1.0
    """Its share beside other tenants."""
    guaranteed_tokens_per_minute: Limit | None = None
    """Prompt and output; up to that its work goes before what others do beyond theirs."""
    key_sha256: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """SHA-256 of its API keys, in hex."""
