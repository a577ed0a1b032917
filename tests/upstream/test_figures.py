"""Reading vLLM's /metrics: what is told, what is not, and what makes no sense."""

import pytest

from proxy.core.limits import CacheConfig
from proxy.core.plugin import PluginPolicy
from proxy.core.selfreport import EngineReport
from proxy.sim.engine import SimulatedEngine
from proxy.sim.http.metrics import EngineMetrics
from proxy.sim.http.server import SimulatedServer
from proxy.upstream.figures import read_cache_config, read_plugin, read_report

CACHE = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%d"} 1.0\n'


def load(
    running: object = 3.0, waiting: object = 2.0, usage: object = 0.25, preempted: object = 7.0, engine: int = 0
) -> str:
    labels = f'{{engine="{engine}",model_name="a}}b{{c"}}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}\n"
        f"vllm:num_requests_waiting{labels} {waiting}\nvllm:kv_cache_usage_perc{labels} {usage}\n"
        f"vllm:num_preemptions_total{labels} {preempted}\nvllm:num_preemptions_created{labels} 1.7e9\n"
    )


class TestCacheConfig:
    def test_of_one_engine(self) -> None:
        text = f'# TYPE vllm:cache_config_info gauge\n{CACHE % (0, 14733)}vllm:num_requests_running{{engine="0"}} 0.0\n'
        assert read_cache_config(text) == CacheConfig(14733 * 16, 16, caches_prefixes=False)

    def test_of_several_in_one_server(self) -> None:
        found = read_cache_config(CACHE % (0, 10) + CACHE % (1, 20))
        assert found is not None
        assert found.kv_tokens == 30 * 16

    @pytest.mark.parametrize(("values", "cached"), [(("True",), True), (("False",), False), (("True", "False"), False)])
    def test_prefix_caching_of_all_engines(self, values: tuple[str, ...], cached: bool) -> None:
        lines = [
            f'vllm:cache_config_info{{block_size="32",enable_prefix_caching="{v}",num_gpu_blocks="4"}} 1.0'
            for v in values
        ]
        assert read_cache_config("\n".join(lines)) == CacheConfig(4 * 32 * len(values), 32, cached)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "vllm:cache_config_info 1.0\n",
            "vllm:cache_config_info{} 1.0\n",
            'vllm:cache_config_info{block_size="16"} 1.0\n',
            'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0\n',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0\n',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="-5"} 1.0\n',
            'vllm:cache_config_info{block_size="0",num_gpu_blocks="5"} 1.0\n',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1e3"} 1.0\n',
            # In a float they would raise, at every probe.
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="1{"0" * 400}"}} 1.0\n',
            f'vllm:cache_config_info{{block_size="1{"0" * 400}",num_gpu_blocks="5"}} 1.0\n',
            '# vllm:cache_config_info{block_size="16",num_gpu_blocks="5"} 1.0\n',
        ],
    )
    def test_unknown(self, text: str) -> None:
        assert read_cache_config(text) is None


class TestReport:
    def test_of_one_engine(self) -> None:
        assert read_report(load()) == EngineReport(3, 2, 0.25, 7)

    def test_of_several_in_one_server(self) -> None:
        """Sequences and preemptions add up, the usage is that of the whole."""
        assert read_report(load() + load(5.0, 0.0, 0.75, 1.0, engine=1)) == EngineReport(8, 2, 0.5, 8)

    def test_without_labels(self) -> None:
        assert read_report("vllm:num_requests_running 4\nvllm:kv_cache_usage_perc 1\n") == EngineReport(4, 0, 1.0, 0)

    def test_by_the_name_that_the_usage_had_before(self) -> None:
        before = load(usage=0.75).replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
        assert read_report(before) == EngineReport(3, 2, 0.75, 7)
        both = load() + "\n".join(line for line in before.splitlines() if "usage" in line)
        assert read_report(both) == EngineReport(3, 2, 0.25, 7)

    def test_of_a_simulated_engine(self) -> None:
        """Those of the simulator's own server, which has vLLM's names."""
        server = SimulatedServer(SimulatedEngine(), model="m")
        server.engine.add("a", 150, 5)
        server.engine.add("b", 1000, 5)
        server.engine.start_step()
        report = read_report(EngineMetrics(server).exposition().decode())
        assert report is not None
        assert (report.running, report.waiting, report.preemptions) == (2, 0, 0)
        assert report.kv_usage == pytest.approx((160 + 368) / 235_728, rel=0.01)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            CACHE % (0, 10),
            load(usage="NaN"),
            load(usage=1.5),
            load(usage=-0.1),
            load(running="Inf"),
            load(running=-1),
            load(preempted="1e300"),
            load(waiting="many"),
            "\n".join(line for line in load().splitlines() if "usage" not in line),
            "\n".join(line for line in load().splitlines() if "running" not in line),
            load().replace("vllm:", "# vllm:"),
        ],
    )
    def test_unknown(self, text: str) -> None:
        assert read_report(text) is None


class TestPlugin:
    def test_the_policy_is_that_of_the_label_whatever_else_is_there(self) -> None:
        text = f'{load()}# TYPE slai_plugin_info gauge\nslai_plugin_info{{version="9",policy="slai",engine="0"}} 1.0\n'
        assert read_plugin(text) is PluginPolicy.SLAI
        assert read_plugin(load()) is None

    @pytest.mark.parametrize(
        ("policies", "found"),
        [
            ((("slai", "1"), ("slai", "1.0")), PluginPolicy.SLAI),
            ((("slai", "1.0"), ("slai", "0.0")), None),
            ((("slai", "1.0"), ("deadline", "1.0")), None),
            ((("slai", "NaN"),), None),
            ((("x" * 10_000, "1.0"),), PluginPolicy.OTHER),
        ],
    )
    def test_data_parallel_engines_are_one(
        self, policies: tuple[tuple[str, str], ...], found: PluginPolicy | None
    ) -> None:
        lines = (f'slai_plugin_info{{engine="{n}",policy="{p}"}} {v}' for n, (p, v) in enumerate(policies))
        assert read_plugin("\n".join(lines)) is found
