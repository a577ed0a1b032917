"""What a request's report says, in the names of OpenTelemetry's GenAI conventions (v0.1.0) and our own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.core.codec import LONGEST_TEXT

if TYPE_CHECKING:
    from proxy.telemetry.report import Breach, RequestReport

Value = str | int | float | bool | tuple[str]
Attributes = Mapping[str, Value]
Found = Mapping[str, Value | None]
"""``None``: there is nothing to tell."""


def clean(text: str) -> str:
    """Make of what others sent something that can be sent on: what cannot would take a whole batch with it."""
    return text[:LONGEST_TEXT].encode(errors="replace").decode()


def told(found: Found) -> Attributes:
    """Leave out what there is nothing to tell of."""
    return {name: value for name, value in found.items() if value is not None}


def breach(late: Breach, report: RequestReport) -> Found:
    """Describe a token that came late."""
    blame = late.blame
    return {
        "slai.tbt.gap": late.gap_seconds,
        "slai.tbt.deadline": report.times.tbt_seconds,
        "slai.tbt.cause": blame.cause.value,
        "slai.engine": report.engine_id,
        "slai.step.duration": blame.step_seconds or None,
        "slai.step.prompt_tokens": blame.prompt_tokens or None,
        "slai.step.largest_prompt.request.id": blame.request_id,
        "slai.step.largest_prompt.tokens": blame.request_tokens or None,
    }


def attempt(report: RequestReport) -> Found:
    """Describe whom the request went to."""
    return called(report.operation, report, report.engine_id)


def called(operation: str, report: RequestReport, engine_id: str | None) -> Found:
    """Describe a call of an engine."""
    host, port = _address(engine_id or "")
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": clean(report.model) or None,
        "server.address": host,
        "server.port": port,
        "slai.engine": engine_id,
        "slai.request.id": report.request_id,
    }


@lru_cache(1024)
def _address(engine_id: str) -> tuple[str | None, int | None]:
    url = urlsplit(engine_id)
    return url.hostname, url.port


def answer(report: RequestReport) -> Found:
    """Describe what was asked for and came of it, in the terms of the GenAI conventions."""
    return {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": clean(report.model) or None,
        "gen_ai.request.stream": report.stream,
        "gen_ai.request.max_tokens": report.max_tokens,
        "gen_ai.request.choice.count": report.sequences if report.sequences > 1 else None,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens or None,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "gen_ai.response.finish_reasons": report.finish_reason and (clean(report.finish_reason),),
        "gen_ai.response.time_to_first_chunk": report.ttft_seconds,
        "http.response.status_code": report.status,
        "error.type": report.reason,
    }


def request(report: RequestReport) -> Found:
    """Describe what the proxy did with it."""
    times = report.times
    return {
        "http.request.method": "POST",
        "url.path": report.path or None,
        "slai.request.id": report.request_id,
        "slai.request.client_id": report.client_id,
        "slai.class": report.request_class.name,
        "slai.tenant": report.tenant or None,
        "slai.outcome": report.outcome and report.outcome.value,
        "slai.engine": report.engine_id,
        "slai.dispatches": report.dispatches,
        "slai.replays": report.replays or None,
        "slai.queue.duration": report.queue_seconds,
        "slai.ttft.missed": report.missed_ttft,
        "slai.tbt.max": times.gap_max if times.gap_count else None,
        "slai.tbt.p99": times.gap_p99(),
        "slai.tbt.mean": times.gap_mean(),
        "slai.tbt.misses": times.misses,
    }
