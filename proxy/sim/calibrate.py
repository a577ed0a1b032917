"""The step model of a live engine, from what it does under requests made for the purpose.

Three experiments: prompts alone (how long their first token takes), streams alone (the gaps between their tokens, for
several numbers and contexts), and a long prompt beside streams (the gaps while it is worked on). Every prompt is new,
so that the engine finds none in its cache. An engine that others use meanwhile gives a model of something else.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np

from proxy.sim.profiles import StepModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

TERMS = ("host", "floor", "per_token", "p", "per_decode", "per_kv_token", "per_attention")
_VOCABULARY = 1000
"""Token ids are drawn from 10 to it: every model has these."""
_STREAM_TOKENS = 48
_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_read=120)


NEEDS_SCIPY = "calibration needs scipy: pip install scipy (the extra 'analysis')"


class CalibrationError(RuntimeError):
    """The engine cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What was measured: a time, and the steps that it is the sum of."""

    kind: str
    """``prompt``, ``streams`` or ``both``."""
    seconds: float
    steps: tuple[tuple[int, int, float, float], ...]
    """Of each: prompt tokens, streams, their context, attention."""
    with_overhead: bool = False
    """Whether the way of a request to the engine and back is part of it."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine says of itself."""

    model: str
    max_model_len: int | None
    kv_tokens: int | None


@dataclass(slots=True)
class Fit:
    """A step model, and how far it is from what was measured."""

    step: StepModel
    overhead_seconds: float
    """Of a request: from the client to the engine and back."""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind: how many, and the median and 90th percentile of the relative error."""
    r2: float = 0.0


async def facts_of(session: aiohttp.ClientSession, url: str) -> EngineFacts:
    """Ask an engine what it serves and how large its KV cache is.

    Raises:
        CalibrationError: it does not answer like vLLM.
    """
    try:
        async with session.get(f"{url}/v1/models") as answer:
            answer.raise_for_status()
            card = (await answer.json())["data"][0]
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__} {error}".strip()
        raise CalibrationError(
            f"{url} does not answer like an OpenAI server ({reason}): --engine wants a base URL, without /v1"
        ) from None
    found = re.search(r"vllm:cache_config_info\{([^}]*)\}", text)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1))) if found else {}
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    kv_tokens = int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else None
    length = card.get("max_model_len")
    return EngineFacts(str(card["id"]), length if isinstance(length, int) else None, kv_tokens)


async def measure(
    url: str,
    *,
    token_budget: int,
    max_num_seqs: int,
    repeats: int = 3,
    seed: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[EngineFacts, list[Observation]]:
    """Carry out the experiments; ``tell`` hears of each.

    Raises:
        CalibrationError: the engine does not answer, or not with as many tokens as asked for.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # vLLM closes idle connections after 5 s
    async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session:
        facts = await facts_of(session, url)
        bench = _Bench(session, url, facts.model, random.Random(seed))
        longest = min(facts.max_model_len or 8192, 8192) - _STREAM_TOKENS - 1
        observations: list[Observation] = []
        await bench.first_token(32)  # whatever an engine does once
        for size in (n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= longest):
            seconds = [await bench.first_token(size) for _ in range(repeats)]
            tell(f"prompt of {size} tokens: {1e3 * median(seconds):.1f} ms")
            observations += [Observation("prompt", s, _chunks(size, token_budget), with_overhead=True) for s in seconds]
        for count in (n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= max_num_seqs):
            for context in (
                c for c in (32, 512, 2048) if c <= longest and count * (c + 64) <= (facts.kv_tokens or 1 << 40)
            ):
                seconds_a_step = await bench.step_of_streams(count, context, token_budget)
                tell(f"{count} streams of {context} tokens: {1e3 * seconds_a_step:.1f} ms a step")
                kv_tokens = count * (context + _STREAM_TOKENS / 2)
                observations.append(Observation("streams", seconds_a_step, ((0, count, kv_tokens, 0.0),)))
        beside = min(8, max_num_seqs - 1)
        if beside > 0 and longest > token_budget:
            observations += await bench.prompt_beside_streams(beside, min(longest, 4 * token_budget), token_budget)
            tell(f"a long prompt beside {beside} streams: done")
    return facts, observations


class _Bench:
    """Requests to one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._rng = rng

    async def first_token(self, prompt_tokens: int) -> float:
        """Return the seconds that a prompt's only token takes."""
        began = time.perf_counter()
        return (await self._times(prompt_tokens, 1))[0] - began

    async def step_of_streams(self, count: int, context: int, token_budget: int) -> float:
        """Return the mean gap between the tokens of streams, for the time in which all of them run.

        A mean, as tokens that come together tell only how long all of them took.
        """
        tokens = _STREAM_TOKENS + 2 * count + count * context // token_budget  # the first waits for the last
        for patience in (1, 4):
            times = await asyncio.gather(*(self._times(context, patience * tokens) for _ in range(count)))
            began, ended = max(t[0] for t in times), min(t[-1] for t in times)
            inside = [[at for at in t if began <= at <= ended] for t in times]
            means = [(t[-1] - t[0]) / (len(t) - 1) for t in inside if len(t) > _STREAM_TOKENS // 4]
            if means:
                return median(means)
        raise CalibrationError(f"{count} streams never ran together: has the engine fewer --max-num-seqs?")

    async def prompt_beside_streams(self, count: int, prompt_tokens: int, token_budget: int) -> list[Observation]:
        """Return the steps of a long prompt beside streams."""
        chunk = token_budget - count
        steps = -(-prompt_tokens // chunk)
        times: list[list[float]] = [[] for _ in range(count)]
        prompt: list[float] = []
        began = 0.0

        async def come_later() -> None:
            nonlocal began
            while not all(times):  # noqa: ASYNC110 - only for a moment
                await asyncio.sleep(0.002)
            began = time.perf_counter()
            prompt.extend(await self._times(prompt_tokens, 1))

        streams = (self._into(t, 64, 2 * steps + 40) for t in times)
        await asyncio.gather(come_later(), *streams)
        found = []
        gaps = [(a, b) for a, b in pairwise(times[0]) if began <= a and b <= prompt[0]]
        for index, (a, b) in enumerate(gaps[1 : steps - 1], 1):
            attention = chunk * (index * chunk + chunk / 2)
            found.append(Observation("both", b - a, ((chunk, count, count * 100.0, attention),)))
        return found

    async def _times(self, prompt_tokens: int, tokens: int) -> list[float]:
        times: list[float] = []
        await self._into(times, prompt_tokens, tokens)
        return times

    async def _into(self, times: list[float], prompt_tokens: int, tokens: int) -> None:
        async for at in self._stream(prompt_tokens, tokens):
            times.append(at)  # noqa: PERF401 - others look at it meanwhile

    async def _stream(self, prompt_tokens: int, tokens: int) -> AsyncIterator[float]:
        """Yield when each token of an answer came."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [self._rng.randrange(10, _VOCABULARY) for _ in range(prompt_tokens)],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        count = 0
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise CalibrationError(f"the engine answers {answer.status}: {(await answer.text())[:200]}")
                async for line in answer.content:
                    if line.startswith(b"data: {") and msgspec.json.decode(line[6:]).get("choices"):
                        count += 1
                        yield time.perf_counter()
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise CalibrationError(f"{self._url}: {error!r}") from None
        if count < 1:
            raise CalibrationError("the engine sends no tokens")


def _chunks(prompt_tokens: int, token_budget: int) -> tuple[tuple[int, int, float, float], ...]:
    """The steps of a prompt alone."""
    starts = range(0, prompt_tokens, token_budget)
    sizes = [min(token_budget, prompt_tokens - start) for start in starts]
    return tuple((n, 0, 0.0, n * (start + n / 2)) for start, n in zip(starts, sizes, strict=True))


def fit(observations: Sequence[Observation]) -> Fit:
    """Fit a step model to what was measured: relative errors, outliers count less.

    Raises:
        CalibrationError: scipy is not installed, or there is too little to fit.
    """
    try:
        from scipy.optimize import least_squares  # noqa: PLC0415 - an extra
    except ImportError:
        raise CalibrationError(NEEDS_SCIPY) from None
    if len(observations) < len(TERMS) + 1:
        raise CalibrationError(f"{len(observations)} measurements are too few for a step model")
    measured = np.array([o.seconds for o in observations])
    fastest = float(measured.min()) * 1e3
    # Scaled to lie around one: milliseconds, per hundred tokens, per ten thousand of context, per million of attention.
    scale = np.array([1, 1, 1e-2, 1, 1, 1e-4, 1e-6, 1])
    start = np.array([fastest / 4, fastest / 2, 1.0, 2.0, 0.1, 0.1, 0.1, 1.0])
    low, high = np.zeros(8), np.full(8, np.inf)
    low[3], high[3] = 1.0, 8.0

    def off(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # Logarithms: twice as long is as far off as half as long, and a model of nothing is infinitely far off.
        errors: np.ndarray[Any, Any] = np.log(np.maximum(_predicted(x * scale, observations), 1e-9) / measured)
        return errors

    best = min(
        (least_squares(off, start * s, bounds=(low, high), loss="soft_l1", f_scale=0.1) for s in _STARTS),
        key=lambda found: float(found.cost),
    )
    terms = best.x * scale
    step = _model(terms)
    predicted = _predicted(terms, observations)
    errors = np.abs(predicted - measured) / measured
    kinds = {o.kind for o in observations}
    by_kind = {kind: errors[[o.kind == kind for o in observations]] for kind in sorted(kinds)}
    residual = float(np.sum((predicted - measured) ** 2))
    return Fit(
        step,
        float(terms[7]) * 1e-3,
        {
            kind: {"count": len(e), "median": float(np.median(e)), "p90": float(np.percentile(e, 90))}
            for kind, e in by_kind.items()
        },
        1 - residual / float(np.sum((measured - measured.mean()) ** 2)),
    )


_STARTS = [np.array(s) for s in ([1.0] * 8, [2, 0.2, 3, 0.5, 1, 1, 1, 1], [0.2, 2, 10, 1, 5, 1, 1, 1])]


def _model(terms: Sequence[float] | np.ndarray[Any, Any]) -> StepModel:
    host, floor, per_token, p, per_decode, per_kv_token, per_attention = (float(v) for v in terms[:7])
    return StepModel(host, 0.0, floor, per_token, p, per_decode, per_kv_token, per_attention)


def _predicted(terms: np.ndarray[Any, Any], observations: Sequence[Observation]) -> np.ndarray[Any, Any]:
    model, overhead = _model(terms), float(terms[7]) * 1e-3
    return np.array([predict(model, o) + overhead * o.with_overhead for o in observations])


def predict(model: StepModel, observation: Observation) -> float:
    """Return the seconds of an observation's steps by a model, without the overhead of a request."""
    return sum(
        model.seconds(
            prefill_tokens=prompt_tokens,
            sequences=streams,
            decodes=streams,
            kv_tokens=round(kv_tokens),
            attention=attention,
        )
        for prompt_tokens, streams, kv_tokens, attention in observation.steps
    )
