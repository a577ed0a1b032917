"""Streams of server-sent events: framing, content, cuts of the network."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from scripted_engine import DONE, SSE, delta, event, head, last, token, usage

from conformance.suite import CHAT, COMPLETIONS, Bench, Claim, case, check, equal, within

if TYPE_CHECKING:
    from conformance.upstream import Script, Seen

AREA = "Streams"

EMOJI = 'data: {"choices":[{"index":0,"text":"🙂"}]}\n\n'.encode()
EMOJI_AT = EMOJI.index("🙂".encode())


async def passes(t: Bench, *pieces: bytes, path: str = COMPLETIONS) -> None:
    """Check that a stream reaches the client byte for byte, and as a stream."""
    t.stream(*pieces)
    answer = await t.post(t.body(chat=path == CHAT), path=path)
    equal(answer.status, 200, "status")
    equal(answer.content_type, "text/event-stream", "content type")
    equal(answer.body, b"".join(pieces), "the stream")
    check(answer.whole, "the stream was not ended in an orderly way")


def each_byte(data: bytes) -> tuple[bytes, ...]:
    return tuple(bytes([byte]) for byte in data)


@case(AREA, "a stream as vLLM sends it", right="byte for byte the same", why="nothing in it is the proxy's")
async def stream_plain(t: Bench) -> None:
    await passes(t, token("a"), token("b"), last(), DONE)
    await passes(t, delta(role="assistant", content=""), delta(content="a"), usage(3, 1), DONE, path=CHAT)


@case(
    AREA,
    "each byte of a stream in an HTTP chunk of its own",
    right="the same bytes",
    why="reads may be cut anywhere, also within a character or an end of line",
)
async def stream_one_byte_per_chunk(t: Bench) -> None:
    await passes(t, *each_byte(token("ab") + b": x\r\n\r\n" + EMOJI + DONE))


@case(
    AREA,
    "a four-byte character cut after its first, second and third byte",
    right="the same bytes",
    why="who decodes each read by itself gets replacement characters or an exception",
)
async def stream_character_cut(t: Bench) -> None:
    for at in (1, 2, 3):
        await passes(t, EMOJI[: EMOJI_AT + at], EMOJI[EMOJI_AT + at :], DONE)


@case(
    AREA,
    "lines that end in CRLF, in CR, or in both by turns, cut between CR and LF",
    right="the same bytes",
    why="the standard allows all three; a relay that rebuilds lines doubles or loses events",
)
async def stream_line_ends(t: Bench) -> None:
    one = b'data: {"choices":[{"index":0,"text":"a"}]}'
    await passes(t, one + b"\r\n\r\n", b"data: [DONE]\r\n\r\n")
    await passes(t, one + b"\r", b"\n\r", b"\n", b"data: [DONE]\r\n\r\n")
    await passes(t, one + b"\r\r", b"data: [DONE]\r\r")
    await passes(t, one + b"\r\n\n", one + b"\n\r\n", one + b"\r\r\n", DONE)


@case(
    AREA,
    "comments before, between and after events",
    right="they pass",
    why="they keep idle connections open on the client's side as well",
)
async def stream_comments(t: Bench) -> None:
    await passes(t, b": ping\n\n", token("a"), b":\n\n: pong\n", token("b"), b": bye\n\n", DONE, b": end\n\n")


@case(
    AREA,
    "`data:` without a space, several data lines, other fields, lines without a colon, a byte order mark",
    right="they pass",
    why="all of it is within the event stream format",
)
async def stream_all_fields(t: Bench) -> None:
    await passes(
        t,
        b"\xef\xbb\xbfevent: chunk\nid: 1\nretry: 5\nfoo\ndata\n",
        b'data:{"choices":\ndata:[{"index":0,"text":"a"}]}\n\n',
        b"data:  two spaces\n\n",
        DONE,
    )


@case(
    AREA,
    "one line of 300 KB, and one of 2 MB",
    right="they pass",
    why="log probabilities and images make such lines; line readers have limits",
)
async def stream_long_lines(t: Bench) -> None:
    await passes(t, token("x" * 300_000), DONE)
    await passes(t, b"data: " + b"y" * 2_000_000 + b"\n\n", token("a"), DONE)


@case(
    AREA,
    "no blank line at the end of the stream",
    right="the last line passes",
    why="what a client makes of it is not the proxy's to decide",
)
async def stream_no_last_blank_line(t: Bench) -> None:
    await passes(t, token("a"), b"data: [DONE]")
    await passes(t, token("a"), b"data: [DONE]\n")


@case(
    AREA,
    "`data: [DONE]` inside a tool call's arguments, also cut in two",
    right="the stream goes on",
    why="only the whole payload `[DONE]` is the end",
)
async def stream_end_marker_as_text(t: Bench) -> None:
    call = delta(tool_calls=[{"index": 0, "id": None, "function": {"arguments": 'print("data: [DONE]\\n\\n")'}}])
    at = call.index(b"[DONE]") + 3
    await passes(t, call[:at], call[at:], delta(content="more"), DONE, path=CHAT)
    await passes(t, token("data: [DONE]\n\n"), token("b"), DONE)


@case(
    AREA,
    "the end marker cut over two reads; bytes after it",
    right="the same bytes",
    why="the transfer's own end is the end",
)
async def stream_end_marker_cut(t: Bench) -> None:
    await passes(t, token("a"), b"data: [DO", b"NE]\n", b"\n")
    await passes(t, token("a"), DONE, b": bye\n\n", token("late"))


@case(
    AREA,
    "chunks without `choices`, with none, with null; JSON that is none; bytes that are not UTF-8",
    right="they pass, and the stream goes on",
    why="an observer that trips over a chunk must not take the stream with it",
)
async def stream_odd_chunks(t: Bench) -> None:
    await passes(t, event({"id": "x"}), event({"choices": []}), event({"choices": None}), token("a"), DONE)
    await passes(t, b"data: {oops\n\n", b'data:   {"x":1e400, "y" : "\\ud800"}\n\n', token("a"), DONE)
    await passes(t, b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n', b"data: \x00\x01\n\n", DONE)
    await passes(t, b"data: " + b"[" * 50_000 + b"\n\n", token("a"), DONE)


@case(
    AREA,
    "the client asked for usage: a last chunk with an empty list of choices",
    right="it passes as it is",
    why="client libraries look for `choices: []` there",
)
async def stream_usage_asked_for(t: Bench) -> None:
    final = usage(3, 2)
    t.stream(token("a"), token("b"), last(), final, DONE)
    answer = await t.post(t.body(stream_options={"include_usage": True}))
    equal(answer.body, token("a") + token("b") + last() + final + DONE, "the stream")
    equal(t.calls[0].json().get("stream_options"), {"include_usage": True}, "what the engine was asked")


@case(
    AREA,
    "the client did not ask for usage, and the proxy does on its own account",
    right="just the usage chunk is taken out, to the byte",
    why="clients that did not ask break on a chunk without choices",
)
async def stream_usage_not_asked_for(t: Bench) -> None:
    async def script(call: Seen) -> None:
        asked = (call.json().get("stream_options") or {}).get("include_usage")
        await call.stream(b": ping\n\n", token("a"), last(), *([usage(3, 1)] if asked else []), b": pong\n\n", DONE)

    t.script(script)
    for path in (COMPLETIONS, CHAT):
        answer = await t.post(t.body(chat=path == CHAT), path=path)
        equal(answer.body, b": ping\n\n" + token("a") + last() + b": pong\n\n" + DONE, "the stream")


@case(
    AREA,
    "tool calls whose later deltas have `id: null`, reasoning deltas, log probabilities",
    right="they pass",
    why="fields that a proxy does not know are not noise",
)
async def stream_unknown_fields(t: Bench) -> None:
    await passes(
        t,
        delta(role="assistant", content=None, reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "id": None, "type": None, "function": {"arguments": "{}"}}]),
        event({"choices": [{"index": 0, "delta": {}, "logprobs": {"content": [{"token": "a", "logprob": -1e-300}]}}]}),
        event({"choices": [], "prompt_token_ids": [1, 2], "x_vendor": {"deep": [None]}}),
        DONE,
        path=CHAT,
    )


@case(
    AREA,
    "an event is sent only when the client has the one before",
    right="each comes within a moment, nothing is held back",
    why="a buffer of a few KB turns a stream into a whole answer",
)
async def stream_not_buffered(t: Bench) -> None:
    received = asyncio.Semaphore(0)

    async def script(call: Seen) -> None:
        await call.begin()
        for number in range(20):
            await call.write(token(str(number)))
            await within(3, received.acquire(), "an event did not reach the client before the next was made")
        await call.write(DONE)
        await call.end()

    t.script(script)
    connection = await t.begin()
    answer = await connection.head()
    for number in range(20):
        await within(3, connection.until(answer, token(str(number))), f"event {number} did not come")
        received.release()
    await connection.rest(answer)
    check(answer.whole and answer.body.endswith(DONE), "the stream did not end")


@case(
    AREA,
    "the head of a stream comes long before its first event",
    right="the client has it at once",
    why="clients tell a slow start from a dead connection by it",
)
async def stream_head_at_once(t: Bench) -> None:
    go = asyncio.Event()

    async def script(call: Seen) -> None:
        await call.begin()
        await go.wait()
        await call.write(token())
        await call.end()

    t.script(script)
    connection = await t.begin()
    try:
        answer = await within(2, connection.head(), "no head before the first event")
    finally:
        go.set()
    equal(answer.status, 200, "status")


@case(
    AREA,
    "a stream of 5,000 events in a few writes, and a client that reads it all",
    right="the same bytes",
    why="what is looked at beside the bytes must not make it slow",
)
async def stream_of_5000_events(t: Bench) -> None:
    pieces = [b"".join(token(f"{part}.{number}") for number in range(500)) for part in range(10)]
    await passes(t, *pieces, DONE)


@case(
    AREA,
    "a stream with neither Content-Length nor chunks, ended by its connection",
    right="the same bytes, and an orderly end for the client",
    why="engines behind simple servers stream so",
)
async def stream_to_the_end_of_the_connection(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.send(head("200 OK", *SSE, "Connection: close") + token("a"))
        await call.send(last() + DONE)
        call.close()

    t.script(script)
    answer = await t.post()
    equal(answer.body, token("a") + last() + DONE, "the stream")
    check(answer.whole, "the stream was not ended in an orderly way")


@case(
    AREA,
    "a stream of stated length",
    right="the same bytes",
    why="a test's engine and a cache answer so",
)
async def stream_of_stated_length(t: Bench) -> None:
    whole = token("a") + last() + DONE
    t.script(lambda call: call.send(head("200 OK", *SSE, f"Content-Length: {len(whole)}") + whole))
    answer = await t.post()
    equal(answer.body, whole, "the stream")


@case(
    AREA,
    "chunk sizes in upper case, with leading zeros and extensions; trailers at the end",
    right="the same bytes; trailers are dropped or passed",
    why="all of it is within HTTP/1.1",
)
async def stream_odd_chunked_coding(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.send(head("200 OK", *SSE, "Transfer-Encoding: chunked", "Trailer: X-Sum"))
        for data in (token("a" * 200), DONE):
            await call.send(b"00%X;name=value\r\n%b\r\n" % (len(data), data))
        await call.send(b"0\r\nX-Sum: 1\r\n\r\n")

    t.script(script)
    answer = await t.post()
    equal(answer.body, token("a" * 200) + DONE, "the stream")
    check(answer.whole, "the stream was not ended in an orderly way")


def cut(after: bytes, how: str) -> Script:
    async def script(call: Seen) -> None:
        await call.begin()
        if after:
            await call.write(after)
        await asyncio.sleep(0.05)  # what was sent must be on its way before a reset overtakes it
        if how == "mid-chunk":
            await call.send(b"40\r\ndata: {")
        if how == "bad chunk":
            await call.send(b"zz\r\n")
        (call.reset if how == "RST" else call.close)()

    return script


def error_event(body: bytes, before: bytes) -> object:
    """Return the error in the only event after ``before``."""
    check(body.startswith(before), f"what had come before the cut was changed: {body[:100]!r}")
    rest = body[len(before) :].strip()
    check(rest.startswith(b"data: "), f"no error event follows the cut: {rest[-200:]!r}")
    check(b"[DONE]" not in rest, "an end marker was made up")
    check(b"\n\n" not in rest, "more than one event follows the cut")
    check(body.endswith(b"\n\n"), "the error event does not end in a blank line")
    try:
        return json.loads(rest.removeprefix(b"data: "))["error"]
    except (ValueError, KeyError, TypeError):
        check(False, f"the event after the cut is no error object: {rest[-200:]!r}")
    return None


@case(
    AREA,
    "an engine cuts a stream after some tokens: FIN, RST, in the middle of a chunk, by a chunk size that is none",
    right="what came passes, then one error event in OpenAI's shape, no `[DONE]`, an orderly end",
    why="a stream that just stops is taken for a whole answer",
    needs=(Claim.RELAY, Claim.LLM),
)
async def stream_cut(t: Bench) -> None:
    for how in ("FIN", "RST", "mid-chunk", "bad chunk"):
        t.script(cut(token("a") + token("b"), how))
        answer = await t.post()
        equal(answer.status, 200, f"status ({how})")
        check(answer.whole, f"the connection was cut instead of an error event ({how})")
        before = token("a") + token("b")
        body = answer.body
        if how == "mid-chunk":
            body = body.replace(b"data: {\n\n", b"", 1)  # the start of an event that had come may pass
        error = error_event(body, before)
        check(isinstance(error, dict) and isinstance(error.get("message"), str), "the error has no message")
        check(b'"finish_reason": "stop"' not in body, "a finish reason was made up")


@case(
    AREA,
    "an engine cuts a stream before its first event",
    right="an error: as a status, or as one event",
    why="an empty stream looks like an empty answer",
    needs=(Claim.RELAY, Claim.LLM),
)
async def stream_cut_before_the_first_event(t: Bench) -> None:
    for how in ("FIN", "RST"):
        t.script(cut(b"", how))
        answer = await t.post()
        if answer.status == 200:
            error_event(answer.body, b"")
        else:
            check(answer.status >= 500, f"status {answer.status}")


@case(
    AREA,
    "an engine cuts a stream, in front of any proxy",
    right="the client can tell that it is not whole: an error event or a broken transfer",
    why="the same, for proxies that know nothing of events",
    needs=(),
)
async def stream_cut_is_noticed(t: Bench) -> None:
    for how in ("FIN", "RST"):
        t.script(cut(token("a"), how))
        answer = await t.post()
        told = b'"error"' in answer.body or not answer.whole or answer.status >= 500
        check(told, f"the client cannot tell that the stream was cut ({how}): {answer.body[-120:]!r}")
        check(b"[DONE]" not in answer.body, "an end marker was made up")


@case(
    AREA,
    "a stream of stated length is cut",
    right="the client's transfer is cut as well",
    why="an error event would be counted as the missing bytes",
)
async def stream_of_stated_length_cut(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.send(head("200 OK", *SSE, "Content-Length: 5000") + token())
        call.close()

    t.script(script)
    connection = await t.begin()
    try:
        answer = await connection.answer()
    except EOFError:
        return
    check(answer.status >= 500 or not answer.whole or len(answer.body) < 5000, "the answer looks whole")


@case(
    AREA,
    "an `error` object inside a stream of status 200",
    right="it passes, and is not wrapped or followed by another",
    why="vLLM tells failures in the middle of a stream so",
)
async def stream_error_object(t: Bench) -> None:
    await passes(t, token("a"), event({"error": {"message": "EngineDeadError", "code": 500}}), DONE)


@case(
    AREA,
    "the client reads slowly, the engine writes as fast as it can",
    right="the engine is held up; the proxy does not buffer megabytes",
    why="one slow client would fill the proxy's memory",
    seconds=20,
)
async def stream_back_pressure(t: Bench) -> None:
    most = 48 << 20
    piece = token("x" * 65_000)
    written = 0

    async def script(call: Seen) -> None:
        nonlocal written
        call.writer.transport.set_write_buffer_limits(high=1 << 16)
        await call.begin()
        while written < most and not call.gone.is_set():
            await call.write(piece)
            written += len(piece)

    t.script(script)
    connection = await t.connect()
    # Until the first event the client reads, then nothing more.
    await connection.send(t.request(t.body()))
    answer = await connection.head()
    await connection.piece(answer)
    before = -1
    while before != written:
        before = written
        await asyncio.sleep(0.5)
    check(written < most, f"the proxy took {written >> 20} MB that nobody read")
    connection.reset()
