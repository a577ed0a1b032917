"""What an operator may set, in vLLM's ``--additional-config '{"slai": {...}}'``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any

from proxy.core.stepplan import Deadline, Order, Rad, Slai

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.core.stepmodel import OnlineStepModel
    from proxy.core.stepplan import StepPolicy

SECTION = "slai"
TBT_ARGUMENT = "slai_tbt_ms"
"""The name in a request's ``vllm_xargs`` by which it tells its TBT deadline in milliseconds."""
_LEAST_TBT_SECONDS = 0.01
"""A client that asks for less would only make the prompts of all others crawl."""


class PluginConfigError(ValueError):
    """The plugin's section of the additional configuration cannot be used."""


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """How the engine is to schedule."""

    policy: str = "deadline"
    """``deadline``, ``slai`` or ``rad``."""
    tbt_ms: float = 500.0
    """TBT deadline of requests that tell none."""
    aging_seconds: float = 4.0
    """So much waiting counts as much as being e times shorter; 0: the shortest first for ever, which may starve."""
    tile_tokens: int = 512
    """``rad``: prompt tokens of a step."""
    most_decodes: int = 128
    """``rad``: decodes from which no prompt is worked on."""

    @classmethod
    def of(cls, vllm_config: Any) -> PluginConfig:
        """Read the section of an engine's configuration.

        Raises:
            PluginConfigError: as from ``read``.
        """
        additional = vllm_config.additional_config
        return cls.read(additional.get(SECTION) if isinstance(additional, dict) else None)

    @classmethod
    def read(cls, section: Mapping[str, Any] | None) -> PluginConfig:
        """Read the section ``slai``.

        Raises:
            PluginConfigError: a name is not known or a value cannot be used.
        """
        if section is None:
            return cls()
        known: dict[str, type] = {f.name: type(getattr(cls(), f.name)) for f in fields(cls)}
        if not isinstance(section, dict):
            raise PluginConfigError(
                f"{SECTION} in --additional-config must be an object, like {{'policy': 'deadline'}}"
            )
        for name, value in section.items():
            if name not in known:
                raise PluginConfigError(f"{SECTION}.{name} is not known; there are {', '.join(known)}")
            wanted = (int, float) if known[name] is float else known[name]
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise PluginConfigError(f"{SECTION}.{name} must be {_KINDS[known[name]]}, not {value!r}")
            if isinstance(value, int | float) and not (isfinite(value) and value >= (name != "aging_seconds")):
                raise PluginConfigError(f"{SECTION}.{name} must be at least 1, not {value!r}")
        config = cls(**section)
        if config.policy not in _POLICIES:
            raise PluginConfigError(f"{SECTION}.policy must be one of {', '.join(_POLICIES)}, not {config.policy!r}")
        return config

    def step_policy(self, model: OnlineStepModel) -> StepPolicy:
        """Return the policy for an engine whose steps ``model`` is taught."""
        order = Order(self.aging_seconds or None)
        if self.policy == "rad":
            return Rad(self.tile_tokens, self.most_decodes)
        return Slai(order) if self.policy == "slai" else Deadline(model, order)

    def tbt_seconds(self, arguments: Mapping[str, Any] | None) -> float:
        """Return a request's TBT deadline, from its ``vllm_xargs`` if that tells a number."""
        told = (arguments or {}).get(TBT_ARGUMENT)
        if isinstance(told, int | float) and not isinstance(told, bool) and isfinite(told) and told > 0:
            return max(told / 1000.0, _LEAST_TBT_SECONDS)
        return self.tbt_ms / 1000.0


_POLICIES = ("deadline", "slai", "rad")
_KINDS = {str: "a string", int: "a whole number", float: "a number"}
