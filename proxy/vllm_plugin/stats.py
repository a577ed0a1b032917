"""What the plugin tells of itself in vLLM's ``/metrics``, by which a proxy knows that it is there.

The scheduler runs in another process than the HTTP server, and what vLLM sends from the one to the other has no field
for it. So its figures travel in a dictionary of vLLM's own statistics (``CARRIER``), and ``PluginStats``, a logger of
these that vLLM finds by an entry point of this package, takes them out again before its other loggers look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge

from proxy.vllm_plugin.options import PluginConfig
from proxy.vllm_plugin.scheduler import BROKEN, CARRIER, HELD, STEPS, StepPlanning

if TYPE_CHECKING:

    class AggregateStatLoggerBase:
        """What vLLM's loggers of all engines of a server are made of."""
else:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

_INFO = Gauge(
    "slai_plugin_info",
    "1 while our scheduler plans the steps, by this policy; 0 after a fault, when vLLM's own rules hold",
    ("engine", "policy"),
    multiprocess_mode="min",
)
# They are counts, but come as such from the engine: each of several API servers sees some of them.
_STEPS = Gauge("slai_plugin_steps", "Steps of the engine so far", ("engine",), multiprocess_mode="max")
_HELD = Gauge("slai_plugin_held", "Times that a sequence sat out a step", ("engine",), multiprocess_mode="max")


class PluginStats(AggregateStatLoggerBase):
    """Shows the plugin's figures beside vLLM's own; nothing beside a vLLM that does not use it."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._policy: str | None = None
        scheduler = getattr(vllm_config.scheduler_config, "scheduler_cls", None)
        if not (isinstance(scheduler, str) and scheduler.startswith(StepPlanning.__module__)):
            return
        self._policy = PluginConfig.of(vllm_config).policy
        for index in engine_indexes:
            self._show(index, {})

    def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
        """Take in what one step tells; ``None`` where it tells nothing."""
        carried: dict[str, int] = getattr(scheduler_stats, CARRIER, None) or {}
        if self._policy is not None and STEPS in carried:
            self._show(engine_idx, {name: carried.pop(name, 0) for name in (STEPS, HELD, BROKEN)})

    def log_engine_initialized(self) -> None:
        """Nothing is to be said to the log."""

    def _show(self, index: int, figures: dict[str, int]) -> None:
        engine = str(index)
        _INFO.labels(engine, self._policy).set(not figures.get(BROKEN, 0))
        _STEPS.labels(engine).set(figures.get(STEPS, 0))
        _HELD.labels(engine).set(figures.get(HELD, 0))
