"""One connection to an engine, and one answer on it.

Written as an asyncio protocol because a relay lives on this path: a read of the socket reaches whoever relays it in
the event loop's own callback, without a stream reader's buffer and a task switch for every token.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, cast

import httptools
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.upstream.received import nothing_received
from proxy.wire.chunks import of_one_chunk
from proxy.wire.errors import UpstreamFailure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

_MAX_OVERHEAD_BYTES = 1 << 16
"""Of a head, interim answers included, and of all else that comes between two pieces of a body."""
_MAX_UNREAD_BYTES = 1 << 16
"""At this much the engine is made to wait until its answer is read on."""
_NO_BODY_BUT_LENGTH = "HEAD"
_TELL_THE_END = (b"content-length", b"transfer-encoding")
_CONTROLS = bytes([*range(9), *range(10, 32), 127])

Sink = Callable[[bytes, bytes | None], bool]
"""Takes a read's part of a body, and the read itself if that is the one chunk of it; says whether it can take more."""


class EngineError(Exception):
    """An engine failed a request; ``failure`` says at which point."""

    def __init__(self, failure: UpstreamFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Watch:
    """Ends the wait for answers that do not go on: one timer for all of them, and not one for each."""

    __slots__ = ("_answers", "_due_at", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: set[EngineAnswer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = inf

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: EngineAnswer) -> None:
        """Look at an answer from now on."""
        self._answers.add(answer)
        self._look_at(self.loop.time() + answer.idle_seconds)

    def remove(self, answer: EngineAnswer) -> None:
        """Look at it no more."""
        self._answers.discard(answer)

    def close(self) -> None:
        """Look at none."""
        self._answers.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, due_at: float) -> None:
        if due_at >= self._due_at:
            return  # whoever is looked at sooner than need be is only looked at once more
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_at = self.loop.call_at(due_at, self._check), due_at

    def _check(self) -> None:
        self._timer, self._due_at = None, inf
        now = self.loop.time()
        self._look_at(min([answer.check(now) for answer in self._answers], default=inf))


class Connection(asyncio.Protocol):
    """A connection to an engine; it carries one exchange at a time and may be used again after a complete one."""

    __slots__ = ("_answer", "_poll", "_sent", "_sent_before", "_transport", "_watch", "closed", "idle_since")

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.closed = False
        self.idle_since = 0.0
        """When the last exchange was over, by the loop's clock."""
        self._answer: EngineAnswer | None = None
        self._poll: select.poll | None = None
        self._sent = 0
        self._sent_before = 0
        """Bytes of requests before the one under way."""

    def ask(self, method: str, request: bytes, body: bytes, idle_seconds: float) -> EngineAnswer:
        """Send a request, whose ``method`` decides on how its answer ends, and return the answer that is to come."""
        answer = self._answer = EngineAnswer(self, method, idle_seconds, self._watch)
        self._sent_before = self._sent
        self._sent += len(request) + len(body)
        if len(body) <= _MAX_UNREAD_BYTES:
            self._transport.write(request + body)
        else:
            self._transport.writelines((request, body))
        return answer

    @property
    def stale(self) -> bool:
        """Whether the other end has closed it, or said something unasked, even if the loop has not noticed yet."""
        if self.closed or self._transport.is_closing():
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(self._poll.poll(0))

    @property
    def sent(self) -> bool:
        """Whether all that was to be sent has left."""
        return self._transport.get_write_buffer_size() == 0

    def rest(self, now: float) -> None:
        """Forget the exchange that is over."""
        self._answer, self.idle_since = None, now

    def abort(self) -> None:
        """Close at once, which is what makes vLLM abort a generation."""
        self._answer = None
        self._transport.abort()

    def pause(self) -> None:
        if not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self.closed:
            self._transport.resume_reading()

    # -- what the event loop calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self._transport.abort()  # nobody asked
        else:
            self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._answer is not None:
            # A broken pipe is a reset in reply to what came after the engine's own end of the connection.
            closed_first = error is None or isinstance(error, BrokenPipeError)
            unread = closed_first and not self._answer.status and self._nothing_received()
            self._answer.end(orderly=error is None, unread=unread)

    def _nothing_received(self) -> bool:
        if self._sent_before == 0 or self._transport.get_extra_info("ssl_object") is not None:
            return False  # other bytes were sent than were counted
        return nothing_received(self._transport.get_extra_info("socket"), self._sent_before)


class EngineAnswer:
    """An engine's answer to one request.

    The parser calls the methods from ``on_message_begin`` to ``on_message_complete``, the connection ``feed`` and
    ``end``; whoever asked waits for ``head`` and then reads by ``chunks``, ``read`` or ``pump``.
    """

    __slots__ = (
        "_between_chunks",
        "_complete",
        "_connection",
        "_failure",
        "_fault",
        "_headers",
        "_held",
        "_interim",
        "_keep_alive",
        "_loop",
        "_method",
        "_overhead_bytes",
        "_parser",
        "_paused",
        "_pieces",
        "_reason",
        "_sink",
        "_unread",
        "_waiter",
        "_waits_since",
        "_watch",
        "ends_with_connection",
        "idle_seconds",
        "raw_headers",
        "status",
    )

    def __init__(self, connection: Connection, method: str, idle_seconds: float, watch: Watch) -> None:
        self.status = 0
        """0 until the head has come."""
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self._connection = connection
        self._method = method
        self.idle_seconds = idle_seconds
        """How long nothing may come while somebody waits for it."""
        self.ends_with_connection = False
        """Whether only the connection's end tells the body's: then it cannot be told from a cut."""
        self._watch = watch
        self._loop = watch.loop
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._headers: CIMultiDictProxy[str] | None = None
        self._reason = b""
        self._between_chunks = False
        """The parser waits for the next chunk, and has seen nothing of it."""
        self._overhead_bytes = 0
        self._interim = False
        self._pieces: list[bytes] = []
        self._unread = 0
        self._paused = False
        self._sink: Sink | None = None
        self._held = False
        """The sink cannot take more for now."""
        self._complete = False
        self._keep_alive = False
        self._failure: UpstreamFailure | None = None
        self._fault: BaseException | None = None
        """What the sink raised."""
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since: float | None = None
        watch.add(self)

    @property
    def reason(self) -> str:
        """As far as it can be passed on: the parser takes any byte, and no head may have them all."""
        return self._reason.translate(None, _CONTROLS).decode("utf-8", "replace")

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """As text, in which bytes that are not UTF-8 are kept as surrogates; none until the head has come whole."""
        if not self.status:
            return CIMultiDictProxy(CIMultiDict())
        if self._headers is None:
            decoded = [
                (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
                for name, value in self.raw_headers
            ]
            self._headers = CIMultiDictProxy(CIMultiDict(decoded))
        return self._headers

    @property
    def content_type(self) -> str:
        """The media type in small letters, without parameters; empty if none was told."""
        for name, value in self.raw_headers:
            if name.lower() == b"content-type":
                return value.decode("latin-1").partition(";")[0].strip().lower()
        return ""

    @property
    def is_whole(self) -> bool:
        """Whether all of the body is here already."""
        return self._complete and self._failure is None

    @property
    def has_more(self) -> bool:
        """Whether more of the body, or its end, is here already."""
        return bool(self._pieces) or self._complete

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            EngineError: they did not come.
        """
        while not self.status:
            if self._failure is not None:
                raise EngineError(self._failure)
            await self._wait()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Give the body in the pieces in which it arrives.

        Raises:
            EngineError: the body ended too early, or the engine fell silent.
        """
        while True:
            if self._pieces:
                data = self._take()
                if self._paused:
                    self._paused = False
                    self._connection.resume()
                yield data
            elif self._failure is not None:
                raise EngineError(self._failure)
            elif self._complete:
                return
            else:
                await self._wait()

    async def read(self) -> bytes:
        """Return the whole body, of which we know that it is short.

        Raises:
            EngineError: as from ``chunks``.
        """
        return b"".join([data async for data in self.chunks()])

    def take(self) -> bytes:
        """Return what has come of the body by now; whoever does so goes on by ``pump``."""
        return self._take() if self._pieces else b""

    def forget_head(self) -> None:
        """Let go of the headers: what follows them may last for long."""
        self._headers = None
        self.raw_headers = _FORGOTTEN

    async def pump(self, sink: Sink, drain: Callable[[], Awaitable[None]]) -> None:
        """Hand every read of the body to ``sink`` in the callback that brings it, until the body ends.

        Where ``sink`` cannot take more, the engine waits until ``drain`` has returned.

        Raises:
            EngineError: as from ``chunks``; and whatever ``sink`` or ``drain`` raises.
        """
        self._sink = sink
        try:
            if self._paused:
                self._paused = False
                self._connection.resume()
            if self._pieces:
                self._pour(sink, self._take())
            while True:
                if self._fault is not None:
                    raise self._fault
                if self._held:
                    await drain()
                    self._held = False
                    self._connection.resume()
                elif self._failure is not None:
                    raise EngineError(self._failure)
                elif self._complete:
                    return
                else:
                    await self._wait()
        finally:
            self._sink = None

    def cut(self) -> None:
        """Let whoever waits for the answer, or for more of it, find that the engine was removed."""
        self._keep_alive = False
        self._fail(UpstreamFailure.REMOVED)
        self._wake()

    def close(self) -> Connection | None:
        """Be done with the answer, and return its connection if another request may use it."""
        self._watch.remove(self)
        self._parser = None  # it refers to us, and would keep us alive
        connection = self._connection
        if self._complete and self._keep_alive and connection.sent and not connection.closed:
            if self._paused or self._held:
                connection.resume()
            connection.rest(self._loop.time())
            return connection
        connection.abort()
        return None

    # -- what the connection calls --

    def feed(self, data: bytes) -> None:
        if self._waits_since is not None:
            self._waits_since = self._loop.time()
        if self._between_chunks and (piece := of_one_chunk(data)) is not None:
            if self._sink is not None:  # nearly every token
                self._overhead_bytes = 0
                self._pour(self._sink, piece, data)
                return
            self.on_body(piece)
        else:
            self._parse(data)
        if self._pieces:
            self._overhead_bytes = 0
            if self._sink is not None:
                self._pour(self._sink, self._take())
                if not self._complete and self._failure is None:
                    return
            elif self._unread > _MAX_UNREAD_BYTES and not self._paused:
                self._paused = True
                self._connection.pause()
        else:
            self._overhead_bytes += len(data)
            if self._overhead_bytes > _MAX_OVERHEAD_BYTES:
                self._cut()
        self._wake()

    def end(self, *, orderly: bool, unread: bool = False) -> None:
        """Note that the connection has ended; ``unread``: before the engine had got anything of the request."""
        if unread:
            self._fail(UpstreamFailure.CONNECT_FAILED)
        if orderly and self.status and self.ends_with_connection:
            self._complete = True
        self._cut()
        self._wake()

    # -- what the parser calls --

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep_alive = False  # more than was asked for
        elif not self.status:
            self._reason = b""

    def on_status(self, reason: bytes) -> None:
        if not self.status:
            self._reason += reason  # it comes in parts, as the reads have them

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # those after the last chunk are not relayed: they may differ from hop to hop
            self.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._interim = True
            self.raw_headers.clear()
            return
        self.status = status
        for name, _ in self.raw_headers:
            if name.lower() in _TELL_THE_END:
                break
        else:
            self.ends_with_connection = True
        if self._method == _NO_BODY_BUT_LENGTH:
            self._complete = True

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)
            self._unread += len(data)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = not self._complete

    def on_message_complete(self) -> None:
        self._between_chunks = False
        if self._interim:
            self._interim = False
        elif not self._complete:
            self._complete = True
            assert self._parser is not None
            self._keep_alive = self._parser.should_keep_alive()

    # -- inside --

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        self._between_chunks = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._between_chunks = False
            self._cut()
        if not data.endswith(b"\r\n"):
            self._between_chunks = False  # the parser tells of a chunk's head only when it has come whole

    def _take(self) -> bytes:
        pieces, self._pieces, self._unread = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _pour(self, sink: Sink, data: bytes, read: bytes | None = None) -> None:
        try:
            keeps_up = sink(data, read)
        except Exception as fault:  # noqa: BLE001 - it belongs to whoever pumps, and not to the event loop
            self._fault, self._sink = fault, None
            self._wake()
            return
        if not keeps_up and not self._held:
            self._held = True
            self._connection.pause()
            self._wake()

    def _cut(self) -> None:
        self._keep_alive = False
        self._fail(UpstreamFailure.CUT_MID_STREAM if self.status else UpstreamFailure.CUT_BEFORE_ANSWER)

    def _fail(self, failure: UpstreamFailure) -> None:
        if not self._complete and self._failure is None:
            self._failure = failure

    def _wait(self) -> asyncio.Future[None]:
        """Return what is done when there is something new, to be awaited at once."""
        waiter = self._waiter = self._loop.create_future()
        self._waits_since = self._loop.time()
        return waiter

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = self._waits_since = None

    def check(self, now: float) -> float:
        """Look whether the engine has been silent for too long while we waited; return when to look again."""
        silent_since = now if self._waits_since is None else self._waits_since
        if now - silent_since >= self.idle_seconds:
            self._fail(UpstreamFailure.TIMED_OUT)
            self._wake()
            return inf
        return silent_since + self.idle_seconds


_FORGOTTEN: list[tuple[bytes, bytes]] = []
