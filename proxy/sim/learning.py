"""How well the proxy's step model has learnt an engine, against what the simulated engine knows of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from proxy.core.stepmodel import OnlineStepModel
from proxy.sim.policies import find_policy
from proxy.sim.simulator import simulate

if TYPE_CHECKING:
    from proxy.core.engine import EngineBelief
    from proxy.sim.engine import SimulatedEngine
    from proxy.sim.study import RunTask

CHECKPOINTS = (10, 100, 500, 2000, 10_000)
"""Steps after which the model is judged, as it is then."""
_JUDGED_STEPS = 500


@dataclass(slots=True)
class _Sample:
    model: OnlineStepModel
    smooth: list[float] = field(default_factory=list)
    """Predicted minus true, without the engine's jitter."""
    actual: list[float] = field(default_factory=list)
    """Predicted minus what the step took."""
    exact: int = 0
    """Steps whose prompt tokens the proxy had counted right."""
    seconds: float = 0.0


class _Judge:
    """Watches an engine's steps: each checkpoint's model predicts those that follow, by what is truly in them."""

    def __init__(self) -> None:
        self.samples: dict[int, _Sample] = {}

    def note(self, engine: SimulatedEngine, belief: EngineBelief) -> None:
        load = engine.step_load
        if not load.decodes:
            return  # nobody saw this step end
        for checkpoint in CHECKPOINTS:
            sample = self.samples.get(checkpoint)
            if sample is None:
                if belief.model.steps < checkpoint:
                    return
                sample = self.samples[checkpoint] = _Sample(OnlineStepModel(belief.model.coefficients))
            if len(sample.smooth) < _JUDGED_STEPS:
                predicted = sample.model.predict(load)
                sample.smooth.append(predicted - engine.smooth_seconds)
                sample.actual.append(predicted - engine.step_seconds)
                sample.exact += belief.backlog - belief.untaken() == load.prefill_tokens
                sample.seconds += engine.step_seconds


def judge_learning(task: RunTask) -> dict[str, Any]:
    """Run ``task`` and return the errors of the step model by checkpoint; seconds, over the first engine's steps.

    Raises:
        ValueError: the task's policy has no proxy, which is who learns.
    """
    policy, judge = find_policy(task.policy), _Judge()
    rules = policy.scheduler(task.options)
    if rules is None:
        raise ValueError(f"policy {task.policy!r} has no proxy, so nothing learns the engine's steps")
    watched: list[SimulatedEngine] = []

    def note(engine: SimulatedEngine, belief: EngineBelief) -> None:
        if not watched:
            watched.append(engine)
        if engine is watched[0]:
            judge.note(engine, belief)

    simulate(task.workload, policy.simulation(task.simulation, task.seed), rules, on_step_end=note)
    return {
        "policy": task.policy,
        "rate": task.rate,
        "seed": task.seed,
        "after_steps": {
            str(checkpoint): {
                "judged_steps": len(sample.smooth),
                "step_s": sample.seconds / len(sample.smooth),
                "error_s": _errors(sample.smooth),
                "error_with_jitter_s": _errors(sample.actual),
                "exact_share": sample.exact / len(sample.smooth),
                "believed_p95": sample.model.prompt_errors.p95,
                "coefficients": _coefficients(sample.model),
            }
            for checkpoint, sample in judge.samples.items()
        },
    }


def _errors(errors: list[float]) -> dict[str, float]:
    found = np.asarray(errors)
    return {
        "mean": float(found.mean()),
        "mae": float(np.abs(found).mean()),
        "p95": float(np.percentile(np.abs(found), 95)),
    }


def _coefficients(model: OnlineStepModel) -> dict[str, float]:
    found = model.coefficients
    return {name: getattr(found, name) for name in found.__slots__}
