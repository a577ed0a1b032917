"""How near to its bound a running proxy's engines are: from its debug view, asked again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from proxy.core.stepmodel import StepLoad
from proxy.sim.bound import Limits, Needs, bound
from proxy.sim.profiles import StepModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STATE_PATH = "/debug/state"
_SECONDS_BETWEEN_LOOKS = 2.0


class LiveError(RuntimeError):
    """The proxy cannot be asked, or does not answer with its state."""


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """One engine, over the time between the first look and the last."""

    id: str
    steps_per_second: float
    decodes: float
    """On average in a step, as are the others."""
    prompt_tokens: float
    kv_tokens: float
    step_seconds: float
    """Predicted by the learnt model for the average step."""
    trusted: bool
    """Whether the model has seen steps enough to be believed."""
    share: float | None
    """Of the bound: the work done per second over the most that could be done of the same mix. ``None``: no steps."""
    binds: str | None
    more_with: dict[str, float]
    """By how much the bound would rise if a limit were twice as large."""


def watch(url: str, seconds: float, sleep: Callable[[float], None] = time.sleep) -> list[LiveEngine]:
    """Look at a proxy's debug view every few seconds for so long, and judge its engines.

    Raises:
        LiveError: it cannot be reached, or answers with something else.
    """
    looks = [(time.monotonic(), _state(url))]
    count = max(1, round(seconds / _SECONDS_BETWEEN_LOOKS))
    for _ in range(count):
        sleep(seconds / count)
        looks.append((time.monotonic(), _state(url)))
    try:
        return compare(looks)
    except (KeyError, TypeError, ValueError) as error:
        raise LiveError(f"{url}: not the state of a proxy of this version ({error!r})") from None


def compare(looks: Sequence[tuple[float, dict[str, Any]]]) -> list[LiveEngine]:
    """Judge two or more states, each with its time in seconds; see ``watch``.

    An engine's model knows what was in its last thousand steps or so: their means over all looks are taken.
    """
    (began, first), (ended, last) = looks[0], looks[-1]
    steps = {engine["id"]: engine["step"] for engine in first["engines"]}
    seen: dict[str, list[Mapping[str, float]]] = {}
    for _, state in looks[1:]:
        for engine in state["engines"]:
            if (load := _mean_load(engine["step_model"])) is not None:
                seen.setdefault(engine["id"], []).append(load)
    return [
        _judge(e, (e["step"] - steps.get(e["id"], e["step"])) / (ended - began), seen.get(e["id"], []))
        for e in last["engines"]
    ]


def _mean_load(learnt: dict[str, Any]) -> Mapping[str, float] | None:
    """What an average step held, of those that the model remembers."""
    count, load = learnt["past_steps"], learnt["past_load"]
    if isinstance(load, list):  # a named tuple, as JSON has it
        load = dict(zip(StepLoad._fields, load, strict=True))
    if not count or load["prefill_tokens"] + load["decodes"] <= 0:
        return None
    return {name: load[name] / count for name in StepLoad._fields}


def _judge(engine: dict[str, Any], steps_per_second: float, seen: Sequence[Mapping[str, float]]) -> LiveEngine:
    learnt = engine["step_model"]
    if not seen:
        return LiveEngine(engine["id"], steps_per_second, 0, 0, 0, 0, learnt["trusted"], None, None, {})
    load = {name: sum(look[name] for look in seen) / len(seen) for name in StepLoad._fields}
    # What an average step holds is the need, and the bound is in steps of today's kind per second.
    needs = Needs(load["prefill_tokens"], load["decodes"], load["kv_tokens"], load["attention"])
    model = _linear(learnt["coefficients"], load["prefills"] / max(1, load["prefill_tokens"]))
    limits = _limits(engine["limits"])
    found = bound(model, limits, needs)
    twice = {
        "token budget": replace(limits, token_budget=2 * limits.token_budget),
        "sequence slots": replace(limits, max_num_seqs=2 * limits.max_num_seqs),
        "KV cache": replace(limits, kv_tokens=2 * limits.kv_tokens),
    }
    most = found.requests_per_second
    gains = {name: bound(model, more, needs).requests_per_second / most - 1 for name, more in twice.items()}
    return LiveEngine(
        engine["id"],
        steps_per_second,
        needs.decodes,
        needs.prompt_tokens,
        needs.kv_tokens,
        model.seconds(
            prefill_tokens=round(needs.prompt_tokens),
            sequences=0,
            decodes=round(needs.decodes),
            kv_tokens=round(needs.kv_tokens),
            attention=needs.attention,
        ),
        learnt["trusted"],
        steps_per_second / most,
        found.binds,
        gains,
    )


def _linear(coefficients: dict[str, float], prefills_per_token: float) -> StepModel:
    """The learnt model in the terms of a profile's; all its tokens cost what prompt tokens do."""
    per_token = coefficients["per_prefill_token"] + coefficients["per_prefill"] * prefills_per_token
    return StepModel(
        host=1e3 * coefficients["fixed"],
        host_per_sequence=0.0,
        floor=0.0,
        per_token=1e3 * per_token,
        p=1.0,
        per_decode=1e3 * (coefficients["per_decode"] - per_token),
        per_kv_token=1e3 * coefficients["per_kv_token"],
        per_attention=1e3 * coefficients["per_attention"],
    )


def _limits(limits: dict[str, Any]) -> Limits:
    kv_tokens = limits["kv_tokens"]
    return Limits(limits["token_budget"], limits["max_num_seqs"], float("inf") if kv_tokens is None else kv_tokens)


def _state(url: str) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise LiveError(f"{url!r} is not a URL such as http://127.0.0.1:9090, the proxy's --debug-port on its machine")
    try:
        answer = httpx.get(url.rstrip("/") + STATE_PATH, timeout=10)
        answer.raise_for_status()
        state = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[
            0
        ]  # the next line is httpx's link to an encyclopedia
        raise LiveError(f"{url}{STATE_PATH}: {reason}; is it the proxy's --debug-port?") from None
    if not isinstance(state, dict):
        raise LiveError(f"{url}{STATE_PATH} does not answer with a proxy's state")
    return state
