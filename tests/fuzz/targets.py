"""What must hold for any bytes; each target raises where it does not."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from multidict import CIMultiDict

from fuzz.oracle import parse
from proxy.core.request import RequestClass
from proxy.upstream.connection import Connection, EngineAnswer, Watch
from proxy.wire import headers as wire_headers
from proxy.wire.coding import BrokenCodingError, TooLongError, UnknownCodingError, inflate
from proxy.wire.errors import UpstreamFailure, answer
from proxy.wire.fingerprint import Fingerprinter
from proxy.wire.keys import presented_key
from proxy.wire.openai import BadRequest, RequestView, peek, read_chunk, read_usage
from proxy.wire.prompt import plan_slices
from proxy.wire.sse import EventSplitter
from proxy.wire.usage import UsageRemover, ask_for_usage

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterator

_CLASS = RequestClass("c", 1.0, 0.1)
_FINGERPRINTER = Fingerprinter(b"k" * 32)


def reads(data: bytes) -> tuple[bytes, list[bytes]]:
    """Take a stream out of fuzz bytes, and the pieces in which it arrives: the first bytes say how long they are."""
    count = data[0] % 8 if data else 0
    sizes = [1 + size for size in data[1 : 1 + count]] or [1 << 20]
    stream = data[1 + count :]
    pieces: list[bytes] = []
    position = 0
    while position < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[position : position + size])
        position += size
    return stream, pieces


def sse(data: bytes) -> None:
    """Events, whatever the cuts: as an independent parser has them, within the limit, at the right boundary."""
    stream, pieces = reads(data)
    right = parse(stream)
    splitter = EventSplitter(max_event_bytes=1 << 24)
    payloads = [payload for piece in pieces for payload in splitter.feed(piece)]
    assert payloads == right.payloads, (payloads, right.payloads)
    assert splitter.at_boundary == right.at_boundary
    assert splitter.oversized == 0
    for payload in payloads:
        read_chunk(payload)
        read_usage(payload)

    # An event of our own stands alone, wherever the stream breaks off.
    frame = answer(UpstreamFailure.CUT_MID_STREAM).sse_frame()
    told = parse(stream + (frame if splitter.at_boundary else b"\n\n" + frame))
    assert told.payloads[-1] == frame[6:-2]

    # A small limit: the same events whatever the cuts, and no more than that is kept.
    limit = 3 + len(stream) % 40
    cut, whole = EventSplitter(max_event_bytes=limit), EventSplitter(max_event_bytes=limit)
    seen: list[bytes] = []
    for piece in pieces:
        seen += cut.feed(piece)
        assert len(cut._pending) <= limit + 2
    assert seen == (whole.feed(stream) if stream else [])
    assert cut.oversized == whole.oversized
    assert set(map(len, seen)) <= set(range(limit + 1))

    # A last event without its blank line may be the report, too, and is all that its client would see of it.
    _usage(stream, pieces, parse(stream + b"\n\n").payloads)


def _usage(stream: bytes, pieces: list[bytes], payloads: list[bytes]) -> None:
    """Taking usage reports out leaves all other events, and all bytes where there is no report."""
    remover = UsageRemover(max_event_bytes=1 << 24)
    passed = b"".join([*(remover.feed(piece) for piece in pieces), remover.end()])
    reports = [payload for payload in payloads if _is_report(payload)]
    assert remover.removed == len(reports)
    if not reports:
        assert passed == stream
    elif not stream.startswith(b"\xef\xbb\xbf"):
        assert parse(passed + b"\n\n").payloads == [payload for payload in payloads if not _is_report(payload)]


def _is_report(payload: bytes) -> bool:
    remover = UsageRemover()
    remover.feed(b"".join(b"data: %b\n" % line for line in payload.split(b"\n")) + b"\n")
    return remover.removed == 1


def body(data: bytes) -> None:
    """Request bodies: what Python's JSON takes for a valid request is read alike; nothing but BadRequest is raised."""
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    for chat in (False, True):
        view = _peek(data, chat=chat)
        if isinstance(view, BadRequest):
            assert len(view.message) < 500
            assert not isinstance(fields, dict) or not _valid(fields, chat=chat), (fields, view)
            continue
        if isinstance(fields, dict):
            assert view.stream == bool(fields.get("stream"))
            assert view.model == _printable(fields.get("model") or "")
        plan_slices(data, chat=chat)
        _FINGERPRINTER.blocks(data, 1000, chat=chat)
    _FINGERPRINTER.whole("/v1/completions", b"", data)
    asked = ask_for_usage(data)
    if asked is not None and isinstance(fields, dict):  # what is not read of a body may be wrong
        more = json.loads(asked)
        assert more.pop("stream_options") == {"include_usage": True}
        assert json.dumps(more, sort_keys=True) == json.dumps(fields, sort_keys=True)
    for coding in ("gzip", "deflate", "br"):
        with suppress(BrokenCodingError, TooLongError, UnknownCodingError):
            assert len(inflate(data, coding, 10_000)) <= 10_000


def _peek(data: bytes, *, chat: bool) -> RequestView | BadRequest:
    try:
        return peek(data, chat=chat)
    except BadRequest as error:
        return error


def _valid(fields: dict[str, Any], *, chat: bool) -> bool:
    """Whether nothing is wrong with the fields that the scheduler reads."""

    def integer(name: str) -> bool:
        value = fields.get(name)
        whole = isinstance(value, float) and value.is_integer()
        return value is None or whole or (isinstance(value, int) and not isinstance(value, bool))

    return (
        isinstance(fields.get("model"), str | None)
        and isinstance(fields.get("stream"), bool | None)
        and integer("max_tokens")
        and (not chat or integer("max_completion_tokens"))
    )


def _printable(model: str) -> str:
    return model.encode(errors="backslashreplace").decode()


def headers(data: bytes) -> None:
    """Headers: hop-by-hop ones and the proxy's own end here, the others pass with all their values."""
    given: CIMultiDict[str] = CIMultiDict(_lines(data))
    named = {name.strip().lower() for value in given.getall("Connection", ()) for name in value.split(",")}
    dropped = wire_headers.HOP_BY_HOP | named

    passed = wire_headers.forward_request_headers(given)
    for name, value in passed:
        lower = name.lower()
        assert lower not in dropped
        assert not lower.startswith(("x-slo-", "x-slai-"))
        assert value in given.getall(name)
    ends_here = {"host", "content-length", "expect"}
    assert len(passed) == sum(
        name.lower() not in dropped | ends_here and not name.lower().startswith(("x-slo-", "x-slai-"))
        for name, _ in given.items()
    )
    without = wire_headers.forward_request_headers(given, keep_credentials=False)
    assert not {name.lower() for name, _ in without} & {"authorization", "x-api-key"}

    back = wire_headers.forward_response_headers(given, keep_content_length=True)
    for name, value in back:
        assert name.lower() not in dropped
        value.encode()  # the server side writes UTF-8, and leaves out what is none
    if "Transfer-Encoding" in given:
        assert "content-length" not in {name.lower() for name, _ in back}

    found = wire_headers.request_id(given)
    assert found is None or re.fullmatch(r"[A-Za-z0-9_-]{1,128}", found)
    wait = wire_headers.retry_after_seconds(given)
    assert wait is None or (isfinite(wait) and wait >= 0)
    presented_key(given)
    with suppress(BadRequest):
        asked = wire_headers.request_class(given, {"c": _CLASS}, _CLASS)
        for seconds in (asked.ttft_seconds, asked.tbt_seconds, asked.ttft_limit_seconds):
            assert seconds is None or 0 < seconds <= 3600
    with suppress(BadRequest):
        wire_headers.may_wait(given)


_NAMES = (
    *(
        "Connection",
        "connection",
        "Keep-Alive",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
        "Content-Length",
        "Host",
    ),
    *("X-Request-Id", "x-slo-ttft-ms", "x-slo-tbt-ms", "x-slo-tpot-ms", "x-slai-no-queue", "Expect"),
    *(
        "x-slo-ttft-limit-ms",
        "Retry-After",
        "retry-after-ms",
        "Authorization",
        "x-api-key",
        "Content-Type",
        "X-A",
        "x-a",
    ),
)


def _lines(data: bytes) -> Iterator[tuple[str, str]]:
    """Read header lines; a first byte below 32 stands for a name that there is code for."""
    for line in data.split(b"\n"):
        if line[:1] and line[0] < 32 and line[:1] != b"\r":
            yield _NAMES[line[0] % len(_NAMES)], line[1:].decode("utf-8", "surrogateescape")
        elif b":" in line:
            name, _, value = line.partition(b":")
            if name:
                yield name.decode("latin-1"), value.strip().decode("utf-8", "surrogateescape")


class _Wire:
    """A transport that takes everything."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


def engine_answer(data: bytes) -> None:
    """An engine's bytes: nothing is raised into the event loop, and cuts change nothing of what is made of them."""
    stream, pieces = reads(data)
    loop = _loop()
    found = loop.run_until_complete(_answered(pieces))
    assert found == loop.run_until_complete(_answered([stream] if stream else [])), stream


async def _answered(pieces: list[bytes]) -> tuple[object, ...]:
    watch = Watch(asyncio.get_running_loop())
    connection, wire = Connection(watch), _Wire()
    connection.connection_made(cast("asyncio.Transport", wire))
    found: EngineAnswer = connection.ask("POST", b"", b"", 60.0)
    for piece in pieces:
        connection.data_received(piece)
    if not connection.closed:
        connection.connection_lost(None)
    body = b"".join(found._pieces)
    headers = sorted(found.headers.items())
    seen = (found.status, found.reason, headers, body, found._complete, found._failure)
    found.close()
    watch.close()
    return seen


_LOOPS: list[AbstractEventLoop] = []


def _loop() -> AbstractEventLoop:
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "sse": sse,
    "body": body,
    "headers": headers,
    "answer": engine_answer,
}

SEEDS: dict[str, list[bytes]] = {
    "sse": [
        b"\x00data: x\n\n",
        b'\x02\x00\x05data: {"choices":[{"index":0,"text":"a"}]}\r\n\r\ndata: [DONE]\r\n\r\n',
        b'\x01\x03data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
        b"\x01\x00\xef\xbb\xbfevent: a\rid: 1\rdata\rdata:b\r\r: c\n\n",
    ],
    "body": [
        b'{"model":"m","prompt":"x","stream":true,"max_tokens":5}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\\ud800"}]}],"stream":false}',
        b'{"model":null,"prompt":[[1,2],[3]],"max_tokens":1e3,"stream_options":null}',
    ],
    "headers": [
        b"Connection: close, X-A\nX-A: 1\n\x00x\n\x09abc\n\x0a1.5\n\x0f1\n\x11 2\n",
        b"Transfer-Encoding: chunked\nContent-Length: 5\nX-N: \xfc\xff\n",
    ],
    "answer": [
        b"\x00HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"\x02\x01\x03HTTP/1.1 100 C\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"\x01\x07HTTP/1.0 404 No\r\nA: b\r\n\r\nbody",
    ],
}
