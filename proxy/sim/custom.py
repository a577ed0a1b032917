"""Policies of your own, named as ``module:attribute``: an order of prompts, an engine's scheduler, or a policy."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.core.config import SchedulerConfig
from proxy.core.policies import PolicyName, configure

if TYPE_CHECKING:
    from proxy.core.ordering import Ordering
    from proxy.sim.policies import PolicyOptions

_HINT = (
    "an order (prompt_tokens, arrived_at) -> key, a class with choose() (proxy.sim.schedulers.Scheduler), or a Policy"
)


def load(spec: str) -> Any:
    """Import what ``module:attribute`` names; modules in the working directory are found.

    Raises:
        ValueError: it cannot be imported; the message says why.
    """
    module_name, _, attribute = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"{spec}: {error}; modules of the working directory, {Path.cwd()}, are found") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--policy {spec}: {error}") from error
    except Exception as error:  # whatever their module does when it is imported
        raise ValueError(f"--policy {spec}: {module_name} cannot be imported: {error!r}") from error


def is_engine_scheduler(found: Any) -> bool:
    return isinstance(found, type) and callable(getattr(found, "choose", None))


def as_ordering(spec: str, found: Any) -> Ordering:
    """Return ``found``, or one of it if it is a class, as an order in which the proxy releases prompts.

    Raises:
        ValueError: it is none.
    """
    try:
        ordering: Ordering = found() if isinstance(found, type) else found
        keys = [ordering(1, 0.0), ordering(4096, 1.5)]
    except Exception as error:
        raise ValueError(f"--policy {spec} is not {_HINT}: {error!r}") from error
    if not all(isinstance(key, int | float) for key in keys):
        raise ValueError(f"--policy {spec}: a key is a number, not {keys[0]!r}")
    return ordering


def proxy_with(ordering: Ordering, options: PolicyOptions) -> SchedulerConfig:
    """The proxy's settings with such an order."""
    base = configure(
        PolicyName.FCFS,
        SchedulerConfig(gate=options.gate(), tenant_guarantees=options.guarantees),
        options.aging_seconds,
    )
    return replace(base, ordering=ordering)
