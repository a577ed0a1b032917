"""The bound as a linear program over kinds of steps: the same answer as the formula, and which mix reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from proxy.sim.bound import Limits, Needs
    from proxy.sim.profiles import StepModel


class SolverMissingError(RuntimeError):
    """There is no scipy."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """A kind of step of the best mix."""

    share: float
    """Of the engine's time."""
    prompt_tokens: float
    decodes: float
    kv_tokens: float


def lp_bound(model: StepModel, limits: Limits, needs: Needs, grid: int = 24) -> tuple[float, list[StepKind]]:
    """Return the most requests per second, and the mix of steps that serves them.

    Steps are those of a grid over prompt tokens, decodes and context, ``grid`` values each, its ends and the average
    step of the formula's among them; so the answer lies at most as far below the formula's as the grid is coarse.

    Raises:
        SolverMissingError: scipy is not installed.
    """
    try:
        from scipy.optimize import linprog  # noqa: PLC0415 - an extra
    except ImportError:
        raise SolverMissingError("--lp needs scipy: pip install 'slai-proxy[analysis]'") from None
    kinds = _kinds(model, limits, needs, grid)
    seconds = np.array([_seconds(model, needs, *kind) for kind in kinds])
    made = np.array(kinds).T / seconds  # per second of such steps
    wanted = np.array([needs.prompt_tokens, needs.decodes, needs.kv_tokens])
    # Variables: the share of time of each kind, and the rate.
    found = linprog(
        np.append(np.zeros(len(kinds)), -1.0),
        A_ub=np.vstack([np.hstack([-made, wanted[:, None]]), np.append(np.ones(len(kinds)), 0.0)]),
        b_ub=np.array([0.0, 0.0, 0.0, 1.0]),
    )
    shares = found.x[:-1]
    return float(found.x[-1]), [StepKind(float(shares[i]), *kinds[i]) for i in np.argsort(-shares) if shares[i] > 1e-6]


def _kinds(model: StepModel, limits: Limits, needs: Needs, grid: int) -> list[tuple[float, float, float]]:
    steps = max(limits.steps(needs).values())
    budget, most = limits.token_budget, min(limits.token_budget, limits.max_num_seqs)
    prompts = {*np.linspace(0, budget, grid).tolist(), needs.prompt_tokens / steps}
    decodes = {*np.linspace(0, most, grid).tolist(), needs.decodes / steps}
    contexts = {*np.linspace(0, limits.kv_tokens, grid).tolist(), needs.kv_tokens / steps}
    if model.tile > 1:  # the corners of the staircase
        tokens = range(model.tile, int(budget) + 1, model.tile)
        prompts |= {t - d for t in tokens for d in (0.0, most, needs.decodes / steps) if t >= d}
        decodes |= {float(t) for t in tokens if t <= most}
    return [
        (x, d, k)
        for x in prompts
        for d in decodes
        for k in contexts
        if 0 < x + d <= budget * (1 + 1e-9) and (d > 0 or k == 0)
    ]


def _seconds(model: StepModel, needs: Needs, prompt_tokens: float, decodes: float, kv_tokens: float) -> float:
    """As ``StepModel.seconds``, of a step with prompt tokens of average depth."""
    attention = prompt_tokens * needs.attention / needs.prompt_tokens
    tokens = prompt_tokens + decodes
    if model.tile > 1:
        tokens = np.ceil(tokens / model.tile - 1e-9) * model.tile
    roofline = (model.floor**model.p + (model.per_token * tokens) ** model.p) ** (1 / model.p)
    return float(
        1e-3
        * (
            model.host
            + (model.host_per_sequence + model.per_decode) * decodes
            + roofline
            + model.per_kv_token * kv_tokens
            + model.per_attention * attention
        )
    )
