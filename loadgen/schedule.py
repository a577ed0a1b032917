"""A schedule: every request of a run, planned before anything is sent, and kept in a file that any machine replays.

The file is JSON lines. The first line describes the schedule (``schedule`` is the version of the format, ``classes``
the latency promises that requests name, ``origin`` where it all came from); each other line is a request:

``index``
    Its number, from 0, in the order of the lines.
``time_s``
    When it is to be sent, in seconds after the start, whole microseconds; lines are in this order. Of a request with
    ``after`` the earliest time: it waits for the answer to request number ``after`` and then ``think_s`` more.
``prompt_tokens``, ``output_tokens``
    Its lengths.
``seed``
    The text: two requests of one seed have the shorter one's prompt in common.
``class``, ``tenant``, ``session``
    Whose it is; left out where empty.
``blocks``, ``block_tokens``
    Names of the blocks of so many tokens that the prompt begins with; the same name is the same text.
``prefix``, ``prefix_tokens``
    The name of a beginning that it shares with every request of the same ``prefix``, and its length.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec

from proxy.core.request import RequestClass
from proxy.sim.workload import ScheduledRequest, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VERSION: Literal[1] = 1

_MOST_TOKENS = 2**31 - 1

_UNTOLD = RequestClass("default")
"""Of requests that name no class: nothing is promised to them."""


class _Class(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    ttft_s: float | None = None
    tbt_s: float | None = None


class _Header(msgspec.Struct, frozen=True):
    schedule: Literal[1]
    classes: tuple[_Class, ...] = ()
    origin: dict[str, Any] = {}


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A request as it stands in the file."""

    index: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    seed: int
    request_class: str = msgspec.field(default="", name="class")
    tenant: str = ""
    session: str = ""
    after: int | None = None
    think_s: float = 0.0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    prefix: str = ""
    prefix_tokens: int = 0


_HEADER = msgspec.json.Decoder(_Header)
_LINE = msgspec.json.Decoder(_Line)
_ENCODER = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of a run in the order of their times."""

    requests: tuple[ScheduledRequest, ...]
    origin: dict[str, Any] = field(default_factory=dict)
    """Where it came from, for reports: trace, seeds, arrivals, rows dropped. It is no part of the identity."""

    @property
    def digest(self) -> str:
        """Return a SHA-256 of all that is sent and when; equal digests are equal loads.

        It is of whole numbers and strings only, whose text is the same everywhere.
        """
        digest = hashlib.sha256()
        for r in self.requests:
            kind = r.request_class
            times = (r.at_seconds, r.think_seconds, kind.ttft_seconds, kind.tbt_seconds)
            microseconds = [None if t is None else round(t * 1e6) for t in times]
            names = (kind.name, r.tenant, r.session, r.prefix)
            sizes = (r.prompt_tokens, r.output_tokens, r.content_seed, r.prefix_tokens, r.block_tokens)
            line = json.dumps([r.index, r.after, *microseconds, *names, *sizes, list(r.blocks)])
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()


def quantised(seconds: float) -> float:
    """Round to whole microseconds, which a file holds exactly."""
    return round(seconds, 6)


def write_schedule(path: str | Path, schedule: Schedule) -> None:
    """Write a schedule; to a name that ends in ``.gz``, compressed.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    with target.open("wb") as file:
        if target.suffix == ".gz":
            # Neither the name nor the time of writing goes into the file: one schedule is one sequence of bytes.
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                _write(packed, schedule)
        else:
            _write(file, schedule)


def _write(file: BinaryIO | gzip.GzipFile, schedule: Schedule) -> None:
    classes = {r.request_class.name: r.request_class for r in schedule.requests}
    listed = tuple(_Class(c.name, c.ttft_seconds, c.tbt_seconds) for _, c in sorted(classes.items()))
    file.write(_ENCODER.encode(_Header(VERSION, listed, schedule.origin)) + b"\n")
    for line in _lines(schedule.requests):
        file.write(line + b"\n")


def _lines(requests: Iterable[ScheduledRequest]) -> Iterator[bytes]:
    for r in requests:
        yield _ENCODER.encode(
            _Line(
                r.index,
                quantised(r.at_seconds),
                r.prompt_tokens,
                r.output_tokens,
                r.content_seed,
                r.request_class.name,
                r.tenant,
                r.session,
                r.after,
                quantised(r.think_seconds),
                r.blocks,
                r.block_tokens,
                r.prefix,
                r.prefix_tokens,
            )
        )


def read_schedule(path: str | Path) -> Schedule:
    """Read what ``write_schedule`` wrote, or what somebody else made in its format.

    Unlike the rows of a trace, no line may be wrong: a schedule that lost some would be another load.

    Raises:
        TraceError: it cannot be read, or a line is wrong; the message names the line.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"cannot read the schedule {str(path)!r}: {error}") from error
    return parse_schedule(str(path), data)


def parse_schedule(name: str, data: bytes) -> Schedule:
    """Read the content of a schedule file; errors name it ``name``.

    Raises:
        TraceError: a line is wrong.
    """
    lines = io.BytesIO(data)
    try:
        header = _HEADER.decode(lines.readline())
    except msgspec.MsgspecError as error:
        raise TraceError(f"{name}, line 1: not the first line of a schedule of version {VERSION} ({error})") from error
    classes = {c.name: RequestClass(c.name, c.ttft_s, c.tbt_s) for c in header.classes}
    classes.setdefault("", _UNTOLD)
    requests: list[ScheduledRequest] = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        try:
            read = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
        if why := _why_wrong(read, len(requests), requests[-1].at_seconds if requests else 0.0, classes):
            raise TraceError(f"{name}, line {number}: {why}")
        requests.append(_as_request(read, classes[read.request_class]))
    if not requests:
        raise TraceError(f"{name}: a schedule without requests")
    return Schedule(tuple(requests), header.origin)


def _as_request(read: _Line, kind: RequestClass) -> ScheduledRequest:
    return ScheduledRequest(
        read.index,
        read.time_s,
        read.prompt_tokens,
        read.output_tokens,
        kind,
        read.seed,
        read.prefix,
        read.prefix_tokens,
        read.tenant,
        read.blocks,
        read.block_tokens,
        read.session,
        read.after,
        read.think_s,
    )


def _why_wrong(line: _Line, index: int, not_before: float, classes: dict[str, RequestClass]) -> str | None:
    """Tell what is wrong with a line whose types are right."""
    if line.index != index:
        return f"index is {line.index} and should be {index}, lines are numbered from 0"
    if line.time_s < not_before:
        return f"time_s {line.time_s:g} comes before that of the line above"
    if not (1 <= line.prompt_tokens <= _MOST_TOKENS and 1 <= line.output_tokens <= _MOST_TOKENS):
        return "prompt_tokens and output_tokens are at least 1"
    if line.request_class not in classes:
        return f"class {line.request_class!r} is not among the classes of line 1"
    if line.after is not None and not 0 <= line.after < index:
        return f"after is {line.after}: a request can only wait for one of the lines above"
    if line.think_s < 0 or line.seed < 0:
        return "think_s and seed are not negative"
    if bool(line.blocks) != (line.block_tokens > 0) or bool(line.prefix) != (line.prefix_tokens > 0):
        return "blocks go with a positive block_tokens, and a prefix with positive prefix_tokens"
    return None
