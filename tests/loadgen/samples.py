"""Results made by hand, for tests of what is drawn from them."""

from array import array
from collections.abc import Sequence

from scripted_upstream import request_at

from loadgen.results import Result
from proxy.core.request import RequestClass

KIND = RequestClass("gold", ttft_seconds=2.0, tbt_seconds=0.1)


def result(
    at: float = 0.0,
    ttft: float = 0.5,
    gaps: Sequence[float] = (0.05,),
    *,
    index: int = 0,
    kind: RequestClass = KIND,
    prompt: int = 3,
    chunk_tokens: Sequence[int] | None = None,
    late: float = 0.0,
) -> Result:
    """One that was served: its first token after ``ttft`` seconds, then one after each of ``gaps``."""
    made = Result(request_at(at, index=index, prompt=prompt, output=len(gaps) + 1, kind=kind), sent_at=at + late)
    now = made.first_byte_at = at + ttft
    for number, gap in enumerate((0.0, *gaps)):
        now += gap
        made.on_tokens(now, chunk_tokens[number] if chunk_tokens else 1)
    made.finished_at = now
    return made


def failed(at: float = 0.0, error: str = "http 503", *, index: int = 0, kind: RequestClass = KIND) -> Result:
    """One that was refused at once."""
    return Result(request_at(at, index=index, kind=kind), sent_at=at, finished_at=at, error=error)


def seconds(*values: float) -> "array[float]":
    return array("d", values)
