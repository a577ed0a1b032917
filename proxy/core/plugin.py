"""Engines that have our scheduler inside (``proxy.vllm_plugin``): what of the proxy's work it does better.

It composes every step anew, so prompts are not cut for it (no tiles), and nobody asks what a whole prompt would do to
the streams there: how long its steps are, and who sits one out, cannot be seen from outside. Whose turn it is, which
engine and who is refused stay with the proxy, and for that the order of an engine's queue has to stay short: the gate
holds on. ``deadline`` lets short prompts pass long ones half-way; what would pass all that it has is not held back.
"""

from __future__ import annotations

from enum import StrEnum


class PluginPolicy(StrEnum):
    """By which rules it schedules; as the plugin's setting ``policy``."""

    DEADLINE = "deadline"
    SLAI = "slai"
    RAD = "rad"
    OTHER = "other"
    """One that this version does not know."""

    @classmethod
    def read(cls, name: str) -> PluginPolicy:
        """Return the policy that an engine names, whatever that is."""
        return next((policy for policy in cls if policy.value == name), cls.OTHER)

    @property
    def takes_deadlines(self) -> bool:
        """Whether it asks for the TBT deadline of a request."""
        return self in (PluginPolicy.DEADLINE, PluginPolicy.SLAI)

    @property
    def lets_short_pass(self) -> bool:
        """Whether a prompt begins before all that have more left to work on, also those half-way."""
        return self is PluginPolicy.DEADLINE
