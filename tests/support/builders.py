"""Values for tests, with every field defaulted: a test names only what it is about."""

from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.engine import EngineBelief
from proxy.core.events import EngineUp
from proxy.core.limits import EngineLimits
from proxy.core.prefix import NO_BLOCKS, PromptBlocks
from proxy.core.request import RELAXED, Request, RequestClass
from proxy.core.scheduler import Scheduler
from proxy.sim.records import RequestRecord
from proxy.sim.workload import ScheduledRequest

ANY_MODEL: frozenset[str] = frozenset()

ONE_STEP = GateConfig(backlog_factor=1.0, feedback_seconds=0.005, kv_watermark=0.03, kv_growth_tokens=64)
"""A gate that releases one step of prompt tokens ahead, whatever the default is."""


def make_request(
    request_id: str = "r",
    prompt_tokens: int = 100,
    *,
    model: str = "",
    max_tokens: int | None = None,
    request_class: RequestClass = RELAXED,
    sliceable: bool = False,
    size_bytes: int = 0,
    fingerprint: bytes | None = None,
    may_wait: bool = True,
    blocks: PromptBlocks = NO_BLOCKS,
    tenant: str = "",
    sequences: int = 1,
) -> Request:
    return Request(
        request_id,
        prompt_tokens,
        model,
        max_tokens,
        request_class,
        sliceable,
        size_bytes,
        fingerprint=fingerprint,
        may_wait=may_wait,
        blocks=blocks,
        tenant=tenant,
        sequences=sequences,
    )


def make_blocks(text: str, tokens: int = 100) -> PromptBlocks:
    """Blocks of ``tokens`` tokens, one for each character: two texts share as many as they begin with alike."""
    hashes = tuple(crc32(text[: i + 1].encode()) for i in range(len(text)))
    return PromptBlocks(hashes, tuple(tokens * (i + 1) for i in range(len(text))))


def make_limits(
    token_budget: int = 512,
    max_num_seqs: int = 128,
    kv_tokens: int | None = None,
    *,
    block_tokens: int = 16,
    caches_prefixes: bool = False,
) -> EngineLimits:
    return EngineLimits(token_budget, max_num_seqs, kv_tokens, block_tokens, caches_prefixes)


def make_engine(
    engine_id: str = "e0",
    *,
    token_budget: int = 512,
    max_num_seqs: int = 128,
    kv_tokens: int | None = None,
    models: Iterable[str] = ANY_MODEL,
    number: int = 0,
    **more: Any,
) -> EngineBelief:
    return EngineBelief(
        engine_id, make_limits(token_budget, max_num_seqs, kv_tokens, **more), frozenset(models), number
    )


def make_scheduler(
    engines: Iterable[str] | Mapping[str, Iterable[str]] = ("e0",),
    *,
    token_budget: int = 512,
    max_num_seqs: int = 128,
    kv_tokens: int | None = None,
    block_tokens: int = 16,
    caches_prefixes: bool = False,
    **config: Any,
) -> Scheduler:
    """A scheduler whose ``engines`` (names, or names with the models that each serves) are up since time 0."""
    scheduler = Scheduler(SchedulerConfig(**{"gate": ONE_STEP, **config}))
    models = engines if isinstance(engines, Mapping) else dict.fromkeys(engines, ANY_MODEL)
    limits = make_limits(
        token_budget, max_num_seqs, kv_tokens, block_tokens=block_tokens, caches_prefixes=caches_prefixes
    )
    for engine_id, served in models.items():
        assert scheduler.handle(EngineUp(engine_id, limits, frozenset(served)), 0.0) == []
    return scheduler


def make_scheduled(
    index: int = 0,
    at_seconds: float = 0.0,
    prompt_tokens: int = 100,
    output_tokens: int = 10,
    *,
    request_class: RequestClass = RELAXED,
) -> ScheduledRequest:
    return ScheduledRequest(index, at_seconds, prompt_tokens, output_tokens, request_class, content_seed=index)


def make_record(
    *token_times: float,
    at_seconds: float = 0.0,
    index: int = 0,
    prompt_tokens: int = 100,
    request_class: RequestClass = RELAXED,
    error: str | None = None,
    finished: bool = True,
) -> RequestRecord:
    """A record of a stream whose tokens came at ``token_times``, finished with the last of them."""
    scheduled = make_scheduled(index, at_seconds, prompt_tokens, len(token_times), request_class=request_class)
    record = RequestRecord(scheduled, sent_at=at_seconds, error=error)
    for time in token_times:
        record.on_tokens(time)
    if finished:
        record.finished_at = token_times[-1] if token_times else at_seconds
    return record
