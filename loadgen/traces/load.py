"""Which format a file has, and reading it."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from loadgen.schedule import Schedule, parse_schedule
from loadgen.traces import conversations, records, servegen, tables
from loadgen.traces.rows import Format, Row, RowTrace, Window, in_order
from proxy.sim.workload import SHAREGPT_LIKE, TraceError, sharegpt_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_FIRST_LINE = 1 << 20
_EVERYWHERE = Window()


def load(name: str, *, seed: int = 0, window: Window = _EVERYWHERE) -> RowTrace | Schedule:
    """Read a trace by its path, plain or gzipped, or make the built-in one (``sharegpt-like``).

    The format is recognised by content. A schedule of our own comes back as such. ``window`` cuts a part out, in
    seconds since the first request; ``seed`` is for formats from which requests are drawn.

    Raises:
        TraceError: no such file, an unknown format, or no usable row.
    """
    if name == SHAREGPT_LIKE:
        made = sharegpt_like()
        rows = tuple(Row(each.prompt_tokens, each.output_tokens) for each in made.lengths)
        return RowTrace(name, Format.BUILT_IN, rows, len(rows), len(rows))
    path = Path(name)
    try:
        if path.is_dir():
            return _load_clients(name, servegen.clients_in(path), seed, window)
        with path.open("rb") as raw:
            sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            # GzipFile is a BufferedIOBase, and all that is asked of it is to be read.
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
            return _load_file(path, file, sha256, seed, window)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{name}: a broken gzip file ({error})") from error
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"cannot read the trace {name!r}: {why}; {SHAREGPT_LIKE!r} is built in") from error


def _load_file(path: Path, file: BinaryIO, sha256: str, seed: int, window: Window) -> RowTrace | Schedule:
    name = str(path)
    first = _first_line(file)
    begins = first.lstrip()
    if begins.startswith(b"["):
        try:
            items = conversations.split(begins + file.read())
        except ValueError as error:
            raise TraceError(f"{name}: not valid JSON ({error})") from error
        return _trace(name, Format.SHAREGPT, conversations.read_conversations(items), sha256, window)
    if begins.startswith(b"{"):
        if b'"schedule"' in begins:
            return parse_schedule(name, first + file.read())
        lines = _chain(first, file)
        if (kind := records.recognise(first)) is not None:
            read = records.read_mooncake if kind is Format.MOONCAKE else records.read_bailian
            return _trace(name, kind, read(lines), sha256, window)
        if conversations.recognise(first):
            return _trace(name, Format.SHAREGPT, conversations.read_conversations(lines), sha256, window)
        raise TraceError(
            f"{name}: JSON of no known kind; known are a ShareGPT array, JSON lines with 'conversations' (ShareGPT) or "
            "with 'timestamp', 'input_length' and 'output_length' (Mooncake, Qwen-Bailian), and our own schedules"
        )
    header = first.decode("utf-8", "replace")
    if (layout := tables.find_layout(header)) is not None:
        text = (line.decode("utf-8", "replace") for line in file)
        return _trace(name, layout.format, tables.read_table(text, layout), sha256, window)
    if servegen.recognise(header):
        return _load_clients(name, [path], seed, window, sha256)
    raise TraceError(
        f"{name}: a table of no known kind. Its first line has to name columns of one of these: {tables.HEADERS}; "
        f"found {header.strip()[:200] or 'nothing'}"
    )


def _first_line(file: BinaryIO) -> bytes:
    """Read up to the end of the first line that is not empty, without a byte order mark."""
    line = file.readline(_LONGEST_FIRST_LINE).removeprefix(_BYTE_ORDER_MARK)
    while line and not line.strip():
        line = file.readline(_LONGEST_FIRST_LINE)
    return line


def _chain(first: bytes, file: BinaryIO) -> Iterator[bytes]:
    yield first if first.endswith(b"\n") else first + file.readline()
    yield from file


def _trace(name: str, kind: Format, rows: Iterable[Row | str], sha256: str | None, window: Window) -> RowTrace:
    kept, dropped, notes = in_order(rows, window)
    if not kept:
        raise TraceError(f"{name}: no usable row; left out: {dict(dropped) or 'the file is empty'}")
    if window.end < Window().end and kept[0].time_s is None:
        raise TraceError(f"{name}: a {kind} has no times of which a window could be taken")
    return RowTrace(name, kind, tuple(kept), len(kept) + dropped.total(), len(kept), dropped, tuple(notes), sha256)


def _load_clients(name: str, paths: list[Path], seed: int, window: Window, sha256: str | None = None) -> RowTrace:
    if not paths:
        raise TraceError(f"{name}: a folder without ServeGen's chunk-*-trace.csv")
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    emitted = 0
    for found in servegen.read_clients(paths, seed, window):
        if isinstance(found, str):
            dropped[found] += 1
        else:
            emitted += 1
            rows += found
    # Each client's requests are in order, but not those of several; that is no fault of the file.
    rows.sort(key=lambda row: row.time_s or 0.0)
    kept, _, _ = in_order(rows, Window())
    if not kept:
        raise TraceError(f"{name}: no requests in it; left out: {dict(dropped)}")
    note = f"{len(kept)} requests were drawn from the {emitted} stretches of time of {len(paths)} clients"
    return RowTrace(name, Format.SERVEGEN, tuple(kept), emitted + dropped.total(), emitted, dropped, (note,), sha256)
