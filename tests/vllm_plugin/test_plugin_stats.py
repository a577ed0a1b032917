"""What the plugin tells in vLLM's ``/metrics``, over statistics that stand in for vLLM's."""

import importlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from plugin_path import PATH
from test_vllm_scheduler import Planned, Request, config

from proxy.core.plugin import PluginPolicy
from proxy.upstream.figures import read_plugin
from proxy.vllm_plugin import scheduler as plugin
from proxy.vllm_plugin.options import PluginConfigError

OURS = "proxy.vllm_plugin.scheduler.scheduler"


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """The module, as vLLM loads it."""
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.AggregateStatLoggerBase = type("AggregateStatLoggerBase", (), {})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, loggers.__name__, loggers)
        found = importlib.import_module("proxy.vllm_plugin.stats")
    yield found
    for metric in (found._INFO, found._STEPS, found._HELD):
        prometheus_client.REGISTRY.unregister(metric)
    del sys.modules[found.__name__]


@pytest.fixture
def stats(module: Any) -> Any:
    for metric in (module._INFO, module._STEPS, module._HELD):
        metric.clear()
    return module.PluginStats


def engine_config(scheduler_cls: Any = OURS, **slai: Any) -> Any:
    found = config(**slai)
    found.scheduler_config.scheduler_cls = scheduler_cls
    return found


def shown(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, labels)


def told() -> PluginPolicy | None:
    return read_plugin(prometheus_client.generate_latest().decode())


class Statistics:
    def make_stats(self) -> Any:
        return SimpleNamespace(num_kv_fetch_reqs_by_stage={"in_progress": 3})


class Engine(Planned, Statistics):
    """The plugin over a scheduler that makes statistics."""


def test_vllm_finds_it() -> None:
    (found,) = entry_points(group="vllm.stat_logger_plugins", name=plugin.ENTRY_POINT)
    assert found.value == "proxy.vllm_plugin.stats:PluginStats"


def test_out_of_a_checkout_it_is_found_by_a_folder_on_the_path() -> None:
    (there,) = metadata.distributions(path=[PATH.split(os.pathsep)[1]])
    (found,) = there.entry_points
    assert there.name == "slai-proxy", "installed as well, it is the same plugin"
    installed = entry_points(group="vllm.stat_logger_plugins", name=plugin.ENTRY_POINT)
    assert {(e.group, e.name, e.value) for e in installed} == {(found.group, found.name, found.value)}


def test_it_is_told_before_the_first_step(stats: Any) -> None:
    stats(engine_config(policy="slai"), [0, 1])
    assert shown("slai_plugin_info", engine="0", policy="slai") == 1
    assert shown("slai_plugin_info", engine="1", policy="slai") == 1
    assert told() is PluginPolicy.SLAI


@pytest.mark.parametrize("scheduler_cls", [None, "mine.Scheduler", object])
def test_beside_a_vllm_that_does_not_use_it_nothing_is_told(stats: Any, scheduler_cls: Any) -> None:
    logger = stats(engine_config(scheduler_cls), [0])
    carried = SimpleNamespace(num_kv_fetch_reqs_by_stage={plugin.STEPS: 1, "in_progress": 2})
    logger.record(carried, None, engine_idx=0)
    assert told() is None
    assert carried.num_kv_fetch_reqs_by_stage == {plugin.STEPS: 1, "in_progress": 2}


def test_settings_that_cannot_be_used_are_refused_here_too(stats: Any) -> None:
    with pytest.raises(PluginConfigError):
        stats(engine_config(policy="nonsense"), [0])


def test_steps_and_holds_come_from_the_scheduler_and_leave_no_trace_in_vllms_own_figures(stats: Any) -> None:
    logger = stats(engine_config(policy="slai"), [0])
    engine = Engine(vllm_config=config(policy="slai", tbt_ms=10_000))
    engine.add(Request("decode", 10))
    engine.step()
    engine.add(Request("long", 5000))
    for _ in range(5):
        engine.step()
    assert engine.held >= 3
    made = engine.make_stats()
    logger.record(made, None, mm_cache_stats=None, engine_idx=0)
    assert made.num_kv_fetch_reqs_by_stage == {"in_progress": 3}
    assert shown("slai_plugin_held", engine="0") == engine.held
    assert shown("slai_plugin_steps", engine="0") == 6
    assert told() is PluginPolicy.SLAI


def test_after_a_fault_it_is_no_plugin_any_more(stats: Any) -> None:
    logger = stats(engine_config(policy="deadline"), [0])
    engine = Engine(vllm_config=config(policy="deadline"))
    engine._break()
    logger.record(engine.make_stats(), None, engine_idx=0)
    assert shown("slai_plugin_info", engine="0", policy="deadline") == 0
    assert told() is None


@pytest.mark.parametrize("statistics", [None, SimpleNamespace(), SimpleNamespace(num_kv_fetch_reqs_by_stage=None)])
def test_steps_without_statistics_and_versions_without_the_carrier_do_no_harm(stats: Any, statistics: Any) -> None:
    logger = stats(engine_config(), [0])
    logger.record(statistics, None, engine_idx=0)
    assert told() is PluginPolicy.DEADLINE


def test_where_vllm_cannot_find_it_nothing_is_carried_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others,only")
    engine = Engine(vllm_config=config())
    assert engine.make_stats().num_kv_fetch_reqs_by_stage == {"in_progress": 3}
    assert "VLLM_PLUGINS" in caplog.text
    monkeypatch.setenv("VLLM_PLUGINS", "others,slai")
    assert plugin.STEPS in Engine(vllm_config=config()).make_stats().num_kv_fetch_reqs_by_stage
