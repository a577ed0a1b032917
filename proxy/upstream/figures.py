"""vLLM's ``/metrics``: what of it the scheduler can use."""

from __future__ import annotations

import re
from collections import defaultdict
from math import isfinite

from proxy.core.limits import CacheConfig
from proxy.core.plugin import PluginPolicy
from proxy.core.selfreport import EngineReport

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_USAGE, _USAGE_BEFORE = "kv_cache_usage_perc", "gpu_cache_usage_perc"
"""vLLM's name of it now, and in older releases; some tell both."""
_STARTED = "process_start_time_seconds"
_ONE = ("1", "1.0")
_TOKENS = ("prompt_tokens_total", "generation_tokens_total")
_SAMPLE = re.compile(
    rf"^(?:vllm:)?(num_requests_running|num_requests_waiting|{_USAGE}|{_USAGE_BEFORE}"
    rf"|num_preemptions_total|{'|'.join(_TOKENS)}|{_STARTED})"
    r"(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
_PLUGIN = re.compile(r"^slai_plugin_info\{(.*)\} (\S+)", re.MULTILINE)
_MOST = 1e12
"""No figure is believed beyond it."""


def read_cache_config(metrics: str) -> CacheConfig | None:
    """Return the KV cache from vLLM's ``/metrics``, data-parallel engines summed; ``None`` if it is not told."""
    blocks, block_tokens, caches_prefixes = 0, 16, True
    for match in _CACHE_CONFIG.finditer(metrics):
        labels = dict(_LABEL.findall(match[1]))
        try:
            blocks += int(labels["num_gpu_blocks"])
            block_tokens = int(labels["block_size"])
        except (KeyError, ValueError):
            return None
        caches_prefixes &= labels.get("enable_prefix_caching") == "True"
    sensible = blocks > 0 < block_tokens and blocks * block_tokens <= _MOST
    return CacheConfig(blocks * block_tokens, block_tokens, caches_prefixes) if sensible else None


def read_plugin(metrics: str) -> PluginPolicy | None:
    """Return by which of our rules the engine composes its steps; ``None``: it has no plugin, or one with a fault.

    Data-parallel engines are one: if one of them goes by other rules, that is none of ours for all of them.
    """
    told = [(dict(_LABEL.findall(labels)).get("policy", ""), value) for labels, value in _PLUGIN.findall(metrics)]
    policies = {PluginPolicy.read(policy) if value in _ONE else None for policy, value in told}
    return policies.pop() if len(policies) == 1 else None


def read_report(metrics: str) -> EngineReport | None:
    """Return what the engine says of its load, data-parallel engines together; ``None`` if a figure makes no sense."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, text in _SAMPLE.findall(metrics):
        try:
            value = float(text)
        except ValueError:
            return None
        if not (isfinite(value) and 0 <= value <= _MOST):
            return None
        found[name].append(value)
    usage = found[_USAGE] or found[_USAGE_BEFORE]
    if not usage or not found["num_requests_running"] or max(usage) > 1:
        return None
    return EngineReport(
        int(sum(found["num_requests_running"])),
        int(sum(found["num_requests_waiting"])),
        sum(usage) / len(usage),
        int(sum(found["num_preemptions_total"])),
        int(sum(sum(found[name]) for name in _TOKENS)) if all(name in found for name in _TOKENS) else None,
        max(found[_STARTED], default=None),
    )
