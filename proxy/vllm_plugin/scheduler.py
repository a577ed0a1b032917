"""vLLM's scheduler with a say in what each step holds.

    vllm serve MODEL --scheduler-cls proxy.vllm_plugin.scheduler.scheduler \
        --additional-config '{"slai": {"policy": "deadline", "tbt_ms": 500}}'

It composes no batch itself. Before each step it tells vLLM's own scheduler (the synchronous or the asynchronous one)
how many tokens the step may hold, who sits it out and in which order those go that wait; all the rest, KV cache,
prefix caching, structured output, LoRA and preemption, stays vLLM's. So what a sequence computes is the same as without
it; only when differs. A fault in here is logged once, and the steps after it are vLLM's own.

Written against vLLM 0.32; ``_Base`` names all that is used of it.
"""

from __future__ import annotations

import logging
import os
import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from proxy.core.stepmodel import OnlineStepModel, StepLoad
from proxy.core.stepplan import Decode, EngineState, Prompt
from proxy.vllm_plugin.options import PluginConfig, PluginConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.stepplan import StepPlan

    class _Base:
        """What is used of ``vllm.v1.core.sched.scheduler.Scheduler``."""

        current_step: int
        max_num_scheduled_tokens: int
        max_num_active_reqs: int
        adaptive_long_prefill_threshold: bool
        block_size: int
        running: list[Any]
        waiting: Any
        requests: dict[str, Any]
        kv_cache_manager: Any
        scheduler_config: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any: ...
        def make_stats(self, *args: Any, **kwargs: Any) -> Any: ...
        def _inflight_prefill_reserved_blocks(self) -> int: ...
else:
    _Base = object

_log = logging.getLogger("vllm.slai")  # below vLLM's own logger, whose handlers and level apply
_MEAN_WEIGHT = 0.05
_REPORT_STEPS = 2_000
_MOST_UNDER_WAY = 16
"""Steps composed and not over; more than any engine has."""
CARRIER = "num_kv_fetch_reqs_by_stage"
"""Counts by name in vLLM's statistics, whose loggers look at no others than those that they know; see ``stats``."""
STEPS, HELD, BROKEN = "slai_steps", "slai_held", "slai_broken"
ENTRY_POINT = "slai"
"""The name of ``stats`` among vLLM's own plugins, as ``VLLM_PLUGINS`` has it."""


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return a scheduler for the engine that is being made; name this function by ``--scheduler-cls``.

    Raises:
        PluginConfigError: the section ``slai`` of the additional configuration cannot be used, or the engine is set up
            in a way that this cannot schedule.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415 - only an engine has it
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if config.parallel_config.pipeline_parallel_size > 1:
        raise PluginConfigError("slai cannot schedule an engine with pipeline parallelism: its steps overlap")
    base = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return type("SlaiScheduler", (StepPlanning, base), {})(*args, **kwargs)


def _is_installed() -> bool:
    """Whether vLLM finds ``stats``."""
    allowed = os.environ.get("VLLM_PLUGINS")
    found = entry_points(group="vllm.stat_logger_plugins", name=ENTRY_POINT)
    return bool(found) and (allowed is None or ENTRY_POINT in allowed.split(","))


class StepPlanning(_Base):
    """Mixed into one of vLLM's schedulers; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slai = PluginConfig.of(kwargs["vllm_config"] if "vllm_config" in kwargs else args[0])
        self._ahead = int(bool(self.scheduler_config.async_scheduling))
        self._fcfs = self.scheduler_config.policy == "fcfs"
        self._model = OnlineStepModel()
        self._policy = self._slai.step_policy(self._model)
        self._clock: Callable[[], float] = time.monotonic
        self._mean_step_seconds = 0.02
        self._last_token_at: dict[str, float] = {}
        self._arrived_at: dict[str, float] = {}
        self._tbt_seconds: dict[str, float] = {}
        self._loads: dict[int, tuple[StepLoad, float]] = {}  # of steps under way, with when they were composed
        self._busy_since: float | None = None  # the end of the step before, if the engine did not stop then
        self._plain_steps = 0  # that are vLLM's own, after a plan that left the engine idle
        self._broken = False
        self.held = 0
        """Times that a sequence sat out a step."""
        self._tells = _is_installed()
        _log.info("slai schedules: %s", self._slai)
        if not self._tells:
            _log.warning(
                "slai is here, but vLLM does not find its entry point: /metrics do not tell of it, and a proxy takes "
                "this engine for a stock one. Install the package (pip install --no-deps slai-proxy), or put its "
                "proxy/vllm_plugin/on_path on PYTHONPATH as well; VLLM_PLUGINS, if set, must name slai"
            )

    # -- what vLLM calls --

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._plan()
        if plan is None:
            return self._note(super().schedule(*args, **kwargs))
        config = self.scheduler_config
        before = (
            self.max_num_scheduled_tokens,
            self.max_num_active_reqs,
            config.long_prefill_token_threshold,
            self.adaptive_long_prefill_threshold,
        )
        try:
            self.max_num_scheduled_tokens = max(1, min(before[0], plan.token_budget))
            if not plan.admits:
                self.max_num_active_reqs = 0
            if plan.chunk_tokens and (not before[2] or plan.chunk_tokens < before[2]):
                config.long_prefill_token_threshold, self.adaptive_long_prefill_threshold = plan.chunk_tokens, False
            output = super().schedule(*args, **kwargs)
        finally:
            (
                self.max_num_scheduled_tokens,
                self.max_num_active_reqs,
                config.long_prefill_token_threshold,
                self.adaptive_long_prefill_threshold,
            ) = before
        if plan.held and not output.total_num_scheduled_tokens:
            self._plain_steps = 1  # what was planned for found no place: nobody is to wait for it
        return self._note(output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        try:
            self._learn(scheduler_output, self._clock())
        except Exception:  # noqa: BLE001 - a fault in here must not cost the engine a step
            self._break()
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        carrier = getattr(stats, CARRIER, None)
        if self._tells and isinstance(carrier, dict):
            carrier |= {STEPS: self._model.steps, HELD: self.held, BROKEN: int(self._broken)}
        return stats

    # -- before a step --

    def _plan(self) -> StepPlan | None:
        """Plan a step and tell vLLM's scheduler what of it can be told beforehand; ``None``: it is vLLM's own."""
        if self._broken or self._plain_steps:
            self._plain_steps = 0
            return None
        try:
            plan = self._policy.plan(self._state(self._clock()))
            for request_id in plan.held:
                request = self.requests[request_id]
                # The running loop passes over those whose step is still to come; it counts up before it looks.
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
            self.held += len(plan.held)
            if plan.order is not None and self._fcfs:
                self._reorder(plan.order)
        except Exception:  # noqa: BLE001 - a fault in here must not cost the engine a step
            self._break()
            return None
        return plan

    def _state(self, now: float) -> EngineState:
        decodes, begun = [], []
        for request in self.running:
            if request.is_prefill_chunk:
                begun.append(self._prompt(request, now))
            else:
                due_at = self._last_token_at.get(request.request_id, now) + self._tbt(request)
                tokens = max(
                    1, request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
                )
                decodes.append(Decode(request.request_id, due_at, request.num_computed_tokens, tokens))
        waiting = [self._prompt(request, now) for request in self.waiting]
        pool = self.kv_cache_manager.block_pool
        reserved = self._inflight_prefill_reserved_blocks() if begun else 0
        free = pool.get_num_free_blocks() - reserved - self.kv_cache_manager.watermark_blocks
        return EngineState(
            now,
            self.max_num_scheduled_tokens,
            decodes,
            begun,
            waiting,
            max(0, self.max_num_active_reqs - len(self.running)),
            max(0, free) * self.block_size,
            self.kv_cache_manager.usage,
            self._mean_step_seconds,
            self._ahead,
        )

    def _prompt(self, request: Any, now: float) -> Prompt:
        left = max(1, request.num_tokens - request.num_computed_tokens)
        arrived_at = self._arrived_at.setdefault(request.request_id, now)  # vLLM's own is by another clock
        if request.num_preemptions:
            arrived_at = float("-inf")  # it was running already; vLLM puts it first as well
        # Where the engine is not told to mind priorities, no client may put itself before the others for good.
        rank = 0 if self._fcfs else request.priority
        return Prompt(request.request_id, left, request.num_computed_tokens, arrived_at, rank)

    def _tbt(self, request: Any) -> float:
        tbt = self._tbt_seconds.get(request.request_id)
        if tbt is None:
            parameters = request.sampling_params
            tbt = self._slai.tbt_seconds(None if parameters is None else parameters.extra_args)
            self._tbt_seconds[request.request_id] = tbt
        return tbt

    def _reorder(self, order: Any) -> None:
        waiting = {request.request_id: request for request in self.waiting}
        ordered = [waiting[request_id] for request_id in order]
        if len(ordered) != len(waiting):
            raise AssertionError("a plan must order all that wait")
        self.waiting.clear()
        self.waiting.extend(ordered)

    # -- after a step --

    def _note(self, output: Any) -> Any:
        """Remember what a step holds and when it was composed."""
        try:
            if output.total_num_scheduled_tokens:
                if len(self._loads) > _MOST_UNDER_WAY:
                    self._loads.clear()  # of steps that never ended
                self._loads[id(output)] = self._load(output), self._clock()
        except Exception:  # noqa: BLE001 - a fault in here must not cost the engine a step
            self._break()
        return output

    def _load(self, output: Any) -> StepLoad:
        prompt_tokens = decodes = context = prompts = 0
        attention = 0.0
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            after = request.num_computed_tokens  # of this step as well: vLLM counts them as soon as they are planned
            before = after - tokens
            if before < request.num_prompt_tokens and tokens > 1:
                prompt_tokens += tokens
                attention += tokens * (before + tokens / 2)
                prompts += 1
            else:
                decodes += 1
                context += before
        return StepLoad(prompt_tokens, decodes, context, attention, prompts)

    def _learn(self, output: Any, now: float) -> None:
        """Take in that a step is over."""
        noted = self._loads.pop(id(output), None)
        if noted is None:
            return
        load, composed_at = noted
        # While there is work step follows step, and each lasts from the end of the one before, all overhead included.
        seconds = now - (composed_at if self._busy_since is None else self._busy_since)
        self._busy_since = now if self.running else None
        self._model.observe(load, seconds)
        self._mean_step_seconds += _MEAN_WEIGHT * (seconds - self._mean_step_seconds)
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and not request.is_prefill_chunk:
                self._last_token_at[request_id] = now
        if output.finished_req_ids or len(self._arrived_at) > 2 * len(self.requests) + 64:
            for known in (self._last_token_at, self._arrived_at, self._tbt_seconds):
                for request_id in known.keys() - self.requests.keys():
                    del known[request_id]
        if self._model.steps % _REPORT_STEPS == 0:
            errors = self._model.prompt_errors
            _log.info(
                "slai: %d steps, sat out %d; error of steps with prompts: mean %.0f %%, p95 %.0f %%",
                self._model.steps,
                self.held,
                100 * errors.mean,
                100 * errors.p95,
            )

    def _break(self) -> None:
        if not self._broken:
            self._broken = True
            _log.exception("slai has a fault; the engine schedules by vLLM's own rules from here on")
