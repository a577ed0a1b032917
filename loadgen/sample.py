"""The requests of a run as columns."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from loadgen.results import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.records import RequestRecord

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One entry for each request, in seconds and tokens; ``inf`` is what never came, ``nan`` what is not known."""

    at: Floats
    ttft: Floats
    first_byte: Floats
    e2e: Floats
    tpot: Floats
    queue: Floats
    completed: Mask
    attained: Mask
    prompt_tokens: Integers
    tokens: Integers
    classes: npt.NDArray[np.str_]
    tenants: npt.NDArray[np.str_]
    gaps: Floats
    """Of all requests, request by request."""
    owners: Integers
    """Which request each gap belongs to."""

    def __len__(self) -> int:
        return len(self.at)

    @staticmethod
    def of(records: Sequence[RequestRecord]) -> Sample:
        gaps = [np.asarray(r.gaps, dtype=float) for r in records]
        return Sample(
            np.array([r.request.at_seconds for r in records], dtype=float),
            np.array([_or_never(r.ttft_seconds) for r in records], dtype=float),
            np.array([_first_byte(r) for r in records], dtype=float),
            np.array([_end_to_end(r) for r in records], dtype=float),
            np.array([_per_token(r) for r in records], dtype=float),
            np.array([np.nan if r.queue_seconds is None else r.queue_seconds for r in records], dtype=float),
            np.array([r.completed for r in records], dtype=bool),
            np.array([r.attained for r in records], dtype=bool),
            np.array([r.request.prompt_tokens for r in records], dtype=np.int64),
            np.array([r.tokens for r in records], dtype=np.int64),
            np.array([r.request.request_class.name for r in records], dtype=str),
            np.array([r.request.tenant for r in records], dtype=str),
            np.concatenate(gaps) if gaps else np.array([], dtype=float),
            np.repeat(np.arange(len(records)), [len(g) for g in gaps]),
        )

    def where(self, mask: Mask) -> Sample:
        """Return the requests that ``mask`` selects, with their gaps."""
        renumbered = np.cumsum(mask) - 1
        kept = mask[self.owners]
        return Sample(
            self.at[mask],
            self.ttft[mask],
            self.first_byte[mask],
            self.e2e[mask],
            self.tpot[mask],
            self.queue[mask],
            self.completed[mask],
            self.attained[mask],
            self.prompt_tokens[mask],
            self.tokens[mask],
            self.classes[mask],
            self.tenants[mask],
            self.gaps[kept],
            renumbered[self.owners[kept]],
        )

    def of_class(self, name: str) -> Sample:
        return self.where(self.classes == name)


def _or_never(seconds: float | None) -> float:
    return inf if seconds is None else seconds


def _first_byte(record: RequestRecord) -> float:
    at = record.first_byte_at if isinstance(record, Result) else record.first_token_at
    return inf if at is None else at - record.request.at_seconds


def _end_to_end(record: RequestRecord) -> float:
    if not record.completed or record.finished_at is None:
        return inf
    return record.finished_at - record.request.at_seconds


def _per_token(record: RequestRecord) -> float:
    """TPOT; there is none of an answer of one token, and that of a request that failed is infinite."""
    if not record.completed or record.last_token_at is None or record.first_token_at is None:
        return inf
    return (record.last_token_at - record.first_token_at) / (record.tokens - 1) if record.tokens > 1 else np.nan
