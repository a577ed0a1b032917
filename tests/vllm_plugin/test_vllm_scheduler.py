"""The plugin over a scheduler that stands in for vLLM's; the real one is in ``tests/real``."""

import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from interpreted import interpreted

from proxy.vllm_plugin.options import PluginConfig, PluginConfigError
from proxy.vllm_plugin.scheduler import StepPlanning, scheduler


@dataclass(eq=False)
class Request:
    """As vLLM has it, as far as the plugin looks."""

    request_id: str
    num_prompt_tokens: int
    xargs: dict[str, Any] | None = None
    priority: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    next_decode_eligible_step: int = 0
    is_prefill_chunk: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    num_tokens_with_spec = num_tokens

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(extra_args=self.xargs)


@dataclass(eq=False)
class Output:
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Engine:
    """Chunked prefill, first come first served: the part of vLLM's scheduler that the plugin steers."""

    def __init__(self, *, vllm_config: Any) -> None:
        self.scheduler_config = vllm_config.scheduler_config
        self.current_step = 0
        self.max_num_scheduled_tokens = 512
        self.max_num_active_reqs = 8
        self.adaptive_long_prefill_threshold = True
        self.block_size = 16
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        pool = SimpleNamespace(get_num_free_blocks=lambda: 1000)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, watermark_blocks=0, usage=0.1)

    def _inflight_prefill_reserved_blocks(self) -> int:
        return 0

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def schedule(self, *, throttle_prefills: bool = False) -> Output:
        self.current_step += 1
        budget, scheduled = self.max_num_scheduled_tokens, dict[str, int]()
        limit = self.scheduler_config.long_prefill_token_threshold
        for request in self.running:
            if self.current_step < request.next_decode_eligible_step:
                continue
            budget -= self._take(request, budget, limit, scheduled)
        while budget and self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.popleft()
            self.running.append(request)
            budget -= self._take(request, budget, limit, scheduled)
        return Output(scheduled)

    def _take(self, request: Request, budget: int, limit: int, scheduled: dict[str, int]) -> int:
        tokens = min(request.num_tokens - request.num_computed_tokens, budget, limit or budget)
        if tokens:
            scheduled[request.request_id] = tokens
            request.num_computed_tokens += tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        return tokens

    def update_from_output(self, output: Output, _: Any) -> str:
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.num_output_tokens += 1
        return "outputs"


class Planned(StepPlanning, Engine):
    now = 0.0

    def step(self, seconds: float = 0.01) -> dict[str, int]:
        self._clock = lambda: self.now
        output = self.schedule()
        self.now += seconds
        assert self.update_from_output(output, None) == "outputs"
        return dict(output.num_scheduled_tokens)


def config(*, asynchronous: bool = False, queue: str = "fcfs", stages: int = 1, **slai: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous, policy=queue, long_prefill_token_threshold=0),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        additional_config={"slai": slai},
    )


def planned(**slai: Any) -> Planned:
    return Planned(vllm_config=config(**slai))


def settings(engine: Planned) -> tuple[Any, ...]:
    return (
        engine.max_num_scheduled_tokens,
        engine.max_num_active_reqs,
        engine.scheduler_config.long_prefill_token_threshold,
        engine.adaptive_long_prefill_threshold,
    )


def test_waiting_prompts_go_shortest_first() -> None:
    engine = planned(policy="slai")
    for name, length in (("a", 600), ("b", 100), ("c", 300)):
        engine.add(Request(name, length))
    assert engine.step() == {"b": 100, "c": 300, "a": 112}


def test_an_engine_with_priorities_keeps_its_own_order() -> None:
    engine = Planned(vllm_config=config(queue="priority"))
    engine.add(Request("a", 600))
    engine.add(Request("b", 100))
    assert engine.step() == {"a": 512}


@pytest.mark.parametrize("policy", ["deadline", "slai", "rad"])
def test_where_priorities_are_not_minded_nobody_gets_ahead_by_one(policy: str) -> None:
    engine = planned(policy=policy)
    engine.add(Request("a", 100))
    engine.add(Request("b", 300, priority=-1000))
    assert next(iter(engine.step())) == "a"


def test_decodes_sit_out_while_prompts_need_the_step_and_run_before_they_are_late() -> None:
    engine = planned(policy="slai", tbt_ms=100)
    engine.add(Request("decode", 10))
    engine.step()
    engine.add(Request("long", 50_000))
    ran = [engine.now for _ in range(90) if "decode" in engine.step()]
    gaps = [b - a for a, b in pairwise(ran)]
    assert max(gaps) < 0.1
    assert min(gaps[-5:]) > 0.03  # once the mean step is known


def test_a_request_tells_its_own_deadline() -> None:
    engine = planned(policy="slai", tbt_ms=1000)
    engine.add(Request("strict", 10, {"slai_tbt_ms": 60}))
    engine.add(Request("relaxed", 10, {"slai_tbt_ms": "nonsense"}))
    engine.step()
    engine.add(Request("long", 50_000))
    ran = [set(engine.step()) for _ in range(30)]
    strict, relaxed = (sum(name in step for step in ran) for name in ("strict", "relaxed"))
    assert strict > 5 * max(1, relaxed)


def test_a_step_is_cut_to_the_deadline_once_the_engine_is_known() -> None:
    engine = planned(policy="deadline", tbt_ms=60)
    engine.max_num_scheduled_tokens = 8192
    engine.add(Request("decode", 10))
    engine.step(0.01)
    engine.add(Request("long", 400_000))
    late = 0
    for n in range(300):
        output = engine.schedule()
        seconds = 0.01 + 1e-4 * output.total_num_scheduled_tokens
        engine.now += seconds
        engine._clock = lambda: engine.now
        engine.update_from_output(output, None)
        late += n > 60 and seconds > 0.06
    assert not late
    assert 350 < output.num_scheduled_tokens["long"] < 500


def test_what_is_set_for_a_step_is_undone_after_it() -> None:
    engine = planned(policy="rad", tile_tokens=64, most_decodes=1)
    before = settings(engine)
    engine.add(Request("a", 10))
    engine.add(Request("b", 1000))
    assert engine.step() == {"a": 10, "b": 54}
    assert settings(engine) == before
    assert engine.step() == {"a": 1}  # a tile of decodes is there: they go alone
    assert settings(engine) == before

    class Broken(Planned):
        pass

    broken = Broken(vllm_config=config(policy="rad", tile_tokens=64))
    broken.add(Request("a", 1000))
    broken._take = None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError):
        broken.schedule()
    assert settings(broken) == before


@interpreted
@pytest.mark.parametrize("fault", ["plan", "learn"])
def test_a_fault_of_the_policy_leaves_the_engine_with_its_own_rules(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = planned(policy="slai")

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    if fault == "plan":
        monkeypatch.setattr(engine, "_policy", SimpleNamespace(plan=fails))
    else:
        monkeypatch.setattr(engine._model, "observe", fails)
    engine.add(Request("a", 600))
    engine.step()
    engine.add(Request("b", 10))
    engine.add(Request("c", 5))
    assert engine.step() == {"a": 88, "b": 10, "c": 5}
    assert engine.step() == {"a": 1, "b": 1, "c": 1}
    assert sum("slai has a fault" in record.message for record in caplog.records) == 1


def test_an_engine_that_a_plan_left_idle_goes_on_by_its_own_rules() -> None:
    engine = planned(policy="slai", tbt_ms=10_000)
    engine.add(Request("decode", 10))
    engine.step()
    engine.add(Request("long", 5000))
    engine.max_num_active_reqs = 9
    engine.waiting, hidden = deque[Request](), engine.waiting  # what was to enter cannot, for a reason of the engine's
    state = engine._state

    def claims(now: float) -> Any:
        engine.waiting = hidden
        found = state(now)
        engine.waiting = deque()
        return found

    engine._state = claims  # type: ignore[method-assign]
    engine._reorder = lambda order: None  # type: ignore[method-assign]
    assert engine.step() == {}
    assert engine.step() == {"decode": 1}


def test_nothing_is_kept_of_requests_that_are_gone() -> None:
    engine = planned(policy="deadline")
    for n in range(500):
        engine.add(Request(str(n), 20))
        engine.step()
        for request in list(engine.running):
            engine.running.remove(request)
            del engine.requests[request.request_id]
    assert len(engine._arrived_at) < 100
    assert len(engine._last_token_at) < 100
    assert len(engine._loads) <= 1


class TestFactory:
    @pytest.fixture(autouse=True)
    def _vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Synchronous(Engine):
            pass

        class Asynchronous(Engine):
            pass

        for name, cls in (("scheduler", Synchronous), ("async_scheduler", Asynchronous)):
            module = ModuleType(f"vllm.v1.core.sched.{name}")
            module.Scheduler = module.AsyncScheduler = cls  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)

    @pytest.mark.parametrize(("asynchronous", "base"), [(False, "Synchronous"), (True, "Asynchronous")])
    def test_it_takes_the_base_that_vllm_would(self, asynchronous: bool, base: str) -> None:
        made = scheduler(vllm_config=config(asynchronous=asynchronous))
        assert [cls.__name__ for cls in type(made).__mro__][1:3] == ["StepPlanning", base]

    def test_an_engine_whose_steps_overlap_is_refused(self) -> None:
        with pytest.raises(PluginConfigError, match="pipeline"):
            scheduler(vllm_config=config(stages=2))

    def test_a_setting_that_cannot_be_used_is_refused_before_the_first_request(self) -> None:
        with pytest.raises(PluginConfigError, match=r"slai\.polcy is not known; there are policy"):
            scheduler(vllm_config=config(polcy="slai"))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"policy": "fifo"}, "one of deadline, slai, rad"),
        ({"policy": 3}, "must be a string"),
        ({"tbt_ms": "fast"}, "must be a number"),
        ({"tbt_ms": True}, "must be a number"),
        ({"tbt_ms": 0}, "at least 1"),
        ({"tbt_ms": float("nan")}, "at least 1"),
        ({"tile_tokens": 1.5}, "a whole number"),
        ([], "must be an object"),
    ],
)
def test_settings_are_checked(section: Any, told: str) -> None:
    with pytest.raises(PluginConfigError, match=told):
        PluginConfig.read(section)


def test_settings_are_optional() -> None:
    assert PluginConfig.read(None) == PluginConfig.read({}) == PluginConfig()
    assert PluginConfig.read({"aging_seconds": 0, "tbt_ms": 80}).tbt_seconds(None) == 0.08


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [({"slai_tbt_ms": 100}, 0.1), ({"slai_tbt_ms": 0.001}, 0.01), ({"slai_tbt_ms": -1}, 0.5), ({"other": 1}, 0.5),
     ({"slai_tbt_ms": float("inf")}, 0.5), ({"slai_tbt_ms": True}, 0.5), ({"slai_tbt_ms": [1]}, 0.5)],
)  # fmt: skip
def test_a_clients_deadline_is_a_sensible_number_or_none(arguments: dict[str, Any], seconds: float) -> None:
    assert PluginConfig().tbt_seconds(arguments) == seconds
