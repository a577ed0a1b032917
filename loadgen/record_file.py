"""Every request of a run in a file, a row each: JSON lines, or Parquet for who has more of them than memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.results import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.sim.records import RequestRecord

_BATCH = 4096


class RecordFileError(ValueError):
    """Records cannot be written so; the message says what to do."""


def check_record_file(target: str) -> None:
    """Find out before a run whether Parquet can be written.

    Raises:
        RecordFileError: it cannot.
    """
    if Path(target).suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise RecordFileError(
            "--records: Parquet needs pyarrow: pip install 'slai-proxy[parquet]', or name a file .jsonl"
        )


def row_of(record: RequestRecord) -> dict[str, Any]:
    """Return one request as it stands in the file; times in seconds since the run's start, in the run's own time."""
    request, result = record.request, record if isinstance(record, Result) else None
    return {
        "index": request.index,
        "intended_at_s": request.at_seconds,
        "sent_at_s": record.sent_at,
        "first_byte_at_s": result.first_byte_at if result else None,
        "first_token_at_s": record.first_token_at,
        "last_token_at_s": record.last_token_at,
        "finished_at_s": record.finished_at,
        "ttft_s": record.ttft_seconds,
        "class": request.request_class.name,
        "tenant": request.tenant,
        "session": request.session,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens_asked": request.output_tokens,
        "tokens": record.tokens,
        "usage_prompt_tokens": result.prompt_tokens if result else None,
        "usage_completion_tokens": result.completion_tokens if result else None,
        "usage_cached_tokens": result.cached_tokens if result else None,
        "server_queue_s": record.queue_seconds,
        "attained": record.attained,
        "error": record.error,
        "status": result.status if result else None,
        "url": result.url if result else None,
        "gaps_s": list(record.gaps),
        "chunk_times_s": list(result.chunk_times) if result else [],
        "chunk_tokens": list(result.chunk_tokens) if result else [],
    }


def write_records(target: str, records: Sequence[RequestRecord]) -> None:
    """Write the records in the order of their sending.

    Raises:
        RecordFileError: Parquet is wanted and pyarrow is not installed.
        OSError: the file cannot be written.
    """
    check_record_file(target)
    if Path(target).suffix == ".parquet":
        _write_parquet(target, records)
        return
    with Path(target).open("wb") as file:
        file.writelines(msgspec.json.encode(row_of(record)) + b"\n" for record in records)


def _write_parquet(target: str, records: Sequence[RequestRecord]) -> None:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    number, whole, text = pa.float64(), pa.int64(), pa.string()
    kinds = {"attained": pa.bool_(), "gaps_s": pa.list_(number), "chunk_times_s": pa.list_(number)}
    kinds |= {"chunk_tokens": pa.list_(pa.int32())} | dict.fromkeys(
        ("class", "tenant", "session", "error", "url"), text
    )
    names = ("index", "prompt_tokens", "output_tokens_asked", "tokens", "status")
    kinds |= dict.fromkeys((*names, *(f"usage_{kind}_tokens" for kind in ("prompt", "completion", "cached"))), whole)
    schema = pa.schema([(name, kinds.get(name, number)) for name in _COLUMNS])
    with pq.ParquetWriter(target, schema) as writer:
        for batch in _batches(records):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _batches(records: Sequence[RequestRecord]) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(records), _BATCH):
        yield [row_of(record) for record in records[start : start + _BATCH]]


_COLUMNS = (
    "index",
    "intended_at_s",
    "sent_at_s",
    "first_byte_at_s",
    "first_token_at_s",
    "last_token_at_s",
    "finished_at_s",
    "ttft_s",
    "class",
    "tenant",
    "session",
    "prompt_tokens",
    "output_tokens_asked",
    "tokens",
    "usage_prompt_tokens",
    "usage_completion_tokens",
    "usage_cached_tokens",
    "server_queue_s",
    "attained",
    "error",
    "status",
    "url",
    "gaps_s",
    "chunk_times_s",
    "chunk_tokens",
)
