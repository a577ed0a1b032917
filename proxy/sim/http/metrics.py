"""``/metrics`` with vLLM's names, labels and meanings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.sim.http.server import SimulatedServer

_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


class EngineMetrics(Collector):
    """Reads an engine's figures at the moment of the scrape."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return the figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family once."""
        server, engine, config = self._server, self._server.engine, self._server.engine.config
        labels = {"model_name": server.limits.model, "engine": "0"}
        kv_tokens = config.blocks * config.block_size
        for name, help_text, value in (
            ("num_requests_running", "Number of requests in model execution batches.", engine.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv_tokens_used / kv_tokens),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=tuple(labels))
            gauge.add_metric(tuple(labels.values()), value)
            yield gauge
        for name, help_text, value in (
            ("num_preemptions", "Cumulative number of preemption from the engine.", engine.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", server.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", engine.generation_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=tuple(labels))
            counter.add_metric(tuple(labels.values()), value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=(*labels, "finished_reason"),
        )
        for reason in _FINISHED_REASONS:
            # vLLM does not count aborted requests here either.
            success.add_metric((*labels.values(), reason), server.finished if reason == "length" else 0)
        yield success
        cache = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": str(engine.finds_blocks),
            "engine": "0",
            "kv_cache_size_tokens": str(kv_tokens),
            "num_gpu_blocks": str(config.blocks),
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(cache)
        )
        info.add_metric(tuple(cache.values()), 1)
        yield info
