"""Headers, framing and the other parts of HTTP that are not bodies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re

from scripted_engine import DONE, JSON, SSE, chunk, head, last, token

from conformance.suite import CHAT, COMPLETIONS, Bench, Claim, case, check, equal, within
from conformance.upstream import Seen, read_body

AREA = "HTTP"

HOP_BY_HOP = ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection")


@case(
    AREA,
    "an engine's hop-by-hop headers, and those that its `Connection` names",
    right="none reaches the client; exactly one Transfer-Encoding or Content-Length",
    why="a copied `Transfer-Encoding: chunked` beside the proxy's own breaks clients",
)
async def answer_hop_by_hop_headers(t: Bench) -> None:
    async def script(call: Seen) -> None:
        lines = ("Connection: close, X-Hop", "X-Hop: secret", "Keep-Alive: timeout=5", "Transfer-Encoding: chunked")
        await call.send(head("200 OK", *SSE, *lines) + chunk(token()) + b"0\r\n\r\n")
        call.close()

    t.script(script)
    answer = await t.post()
    equal(answer.status, 200, "status")
    check(not answer.header("x-hop"), "a header named in Connection was passed on")
    check("timeout=5" not in answer.header("keep-alive"), "the engine's Keep-Alive was passed on")
    framings = [*answer.header("transfer-encoding"), *answer.header("content-length")]
    equal(len(framings), 1, f"framings of the answer {framings}")
    equal(answer.body, token(), "the body")


@case(
    AREA,
    "a client's hop-by-hop headers, and those that its `Connection` names",
    right="none reaches the engine",
    why="they are about another connection",
)
async def request_hop_by_hop_headers(t: Bench) -> None:
    await t.post(
        t.body(), "Connection: close, X-Hop", "X-Hop: 1", "TE: trailers", "Proxy-Connection: x", "Keep-Alive: 9"
    )
    call = t.calls[0]
    for name in ("x-hop", "te", "proxy-connection", "keep-alive"):
        check(not call.header(name), f"{name} reached the engine")
    check("X-Hop" not in ",".join(call.header("connection")), "Connection was passed on")


@case(
    AREA,
    "a client's end-to-end headers, custom ones, repeated ones, two spellings of one",
    right="they reach the engine, with all their values",
    why="routing keys, tenants and betas travel in headers",
)
async def request_headers_pass(t: Bench) -> None:
    own = (
        "X-Session-Id: s 1",
        "OpenAI-Beta: a=v1",
        "X-Twice: 1",
        "x-twice: 2",
        "Accept-Language: de;q=0.5",
        "X-Empty:",
    )
    await t.post(t.body(), *own)
    call = t.calls[0]
    equal(call.header("x-session-id"), ["s 1"], "X-Session-Id")
    equal(call.header("openai-beta"), ["a=v1"], "OpenAI-Beta")
    equal(", ".join(call.header("x-twice")), "1, 2", "X-Twice")
    equal(call.header("accept-language"), ["de;q=0.5"], "Accept-Language")
    equal(call.header("content-type"), ["application/json"], "Content-Type")


@case(
    AREA,
    "an engine's own headers, two cookies, a value that is not ASCII",
    right="they reach the client",
    why="the other direction of the same",
)
async def answer_headers_pass(t: Bench) -> None:
    lines = (
        "Set-Cookie: a=1; Path=/",
        "Set-Cookie: b=2",
        "X-Engine: 7",
        "X-Name: \xc3\xbcn\xc3\xaf",
        "Cache-Control: no-cache",
    )
    t.script(lambda call: call.answer(b"{}", headers=(*JSON, *lines)))
    answer = await t.post(t.body(stream=False))
    equal(answer.header("set-cookie"), ["a=1; Path=/", "b=2"], "Set-Cookie")
    equal(answer.header("x-engine"), ["7"], "X-Engine")
    equal(answer.header("x-name"), ["\xc3\xbcn\xc3\xaf"], "X-Name")
    equal(answer.header("cache-control"), ["no-cache"], "Cache-Control")


@case(
    AREA,
    "header values of bytes that are not UTF-8, in both directions",
    right="the same bytes, or the same text (as Latin-1) in UTF-8; nothing is lost",
    why="HTTP allows them, and names in file headers have them",
)
async def headers_not_utf8(t: Bench) -> None:
    t.script(lambda call: call.answer(b"{}", headers=(*JSON, "X-Name: \xfcn\xef")))
    answer = await t.post(t.body(stream=False), "X-Name: \xe4\xff")
    as_utf8 = "\xe4\xff".encode().decode("latin-1")
    check(t.calls[0].header("x-name") in (["\xe4\xff"], [as_utf8]), f"at the engine {t.calls[0].header('x-name')}")
    as_utf8 = "\xfcn\xef".encode().decode("latin-1")
    check(answer.header("x-name") in (["\xfcn\xef"], [as_utf8]), f"at the client {answer.header('x-name')}")


@case(
    AREA,
    "engine and proxy both have a `Server` and a `Date`",
    right="one each",
    why="some clients and caches refuse two",
    needs=(),
)
async def answer_server_and_date_once(t: Bench) -> None:
    lines = ("Server: uvicorn", "Date: Mon, 01 Jan 2001 00:00:00 GMT")
    t.script(lambda call: call.answer(b'{"choices":[{"index":0,"text":"a"}]}', headers=(*JSON, *lines)))
    answer = await t.post(t.body(stream=False))
    check(len(answer.header("server")) <= 1, f"Server: {answer.header('server')}")
    equal(len(answer.header("date")), 1, "number of Date headers")


@case(
    AREA,
    "an engine's answer has no Content-Type",
    right="none is invented",
    why="who invents one decides how a client reads the body",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def answer_without_content_type(t: Bench) -> None:
    t.script(lambda call: call.answer(b"abc", headers=()))
    answer = await t.post(t.body(stream=False))
    equal((answer.body, answer.header("content-type")), (b"abc", []), "body and Content-Type")
    answer = await t.get(f"/file?{t.token}")
    equal((answer.body, answer.header("content-type")), (b"abc", []), "body and Content-Type of a file")


@case(AREA, "header lines of 16 KB, in both directions", right="they pass", why="tokens and cookies are long")
async def long_headers(t: Bench) -> None:
    long = "v" * 16_000
    t.script(lambda call: call.answer(b"{}", headers=(*JSON, f"X-Long: {long}")))
    answer = await t.post(t.body(stream=False), f"X-Long: {long}")
    equal(answer.status, 200, "status")
    equal(t.calls[0].header("x-long"), [long], "the client's")
    equal(answer.header("x-long"), [long], "the engine's")


@case(
    AREA,
    "a head of 4 MB",
    right="a 4xx or a cut, soon; the engine sees nothing of it",
    why="heads have to be bounded",
    needs=(),
)
async def head_without_end(t: Bench) -> None:
    connection = await t.connect()
    try:
        await within(5, connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (4 << 20)), "")
        answer = await within(5, connection.head(), "the proxy waits for more of a head of 4 MB")
    except (EOFError, ConnectionError):
        return
    check(400 <= answer.status < 500, f"status {answer.status}")


@case(
    AREA,
    "a request whose answer comes in one piece, with status, reason and body of the engine's own",
    right="all three pass",
    why="also statuses that nobody has heard of",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def answer_status_and_reason(t: Bench) -> None:
    t.script(lambda call: call.answer(b"x", status="218 This is fine", headers=JSON))
    answer = await t.get(f"/anything?{t.token}")
    equal((answer.status, answer.body), (218, b"x"), "status and body")


@case(
    AREA,
    "both Content-Length and Transfer-Encoding in a request, in both orders",
    right="400, or the chunked body alone; never two requests at the engine",
    why="request smuggling",
    needs=(),
)
async def smuggling_length_and_chunks(t: Bench) -> None:
    inner = f"GET /smuggled?{t.token} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    for order in (0, 1):
        framing = [f"Content-Length: {len(inner) + 5}", "Transfer-Encoding: chunked"]
        connection = await t.connect()
        await connection.send(t.request(b"0\r\n\r\n" + inner, *(framing[::-1] if order else framing)))
        try:
            answer = await within(6, connection.head(), "neither an answer nor an end")
            check(answer.status >= 400 or answer.status == 200, f"status {answer.status}")
        except (EOFError, ConnectionError):
            pass
        await asyncio.sleep(0.05)
    check(not [call for call in t.calls if "smuggled" in call.target], "the smuggled request reached the engine")


@case(
    AREA,
    "two different lengths, a length that is none, one with a sign, a coding that is unknown, a space before the colon",
    right="400 (501) or a cut, nothing at the engine",
    why="two servers could read them differently",
    needs=(),
)
async def smuggling_odd_framing(t: Bench) -> None:
    for lines in (
        ("Content-Length: 3", "Content-Length: 4"),
        ("Content-Length: 3, 4",),
        ("Content-Length: abc",),
        ("Content-Length: +3",),
        ("Content-Length: -1",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: \x0bchunked",),
    ):
        connection = await t.connect()
        await connection.send(t.request(b"0\r\n\r\n", *lines, path=f"{COMPLETIONS}?{t.token}"))
        try:
            answer = await within(6, connection.head(), f"neither an answer nor an end to {lines}")
            check(400 <= answer.status < 600, f"status {answer.status} for {lines}")
        except (EOFError, ConnectionError):
            pass
        check(not t.calls, f"the request with {lines} reached the engine")


@case(
    AREA,
    "chunk sizes that are no numbers, too large, signed; a chunk longer than its size",
    right="400 or a cut, nothing at the engine as a whole request",
    why="the same in the chunked coding",
    needs=(),
)
async def smuggling_bad_chunks(t: Bench) -> None:
    body = t.body()
    for chunks in (
        b"zz\r\n",
        b"-1\r\n",
        b"fffffffffffffffff1\r\nx",
        b"0x10\r\nx",
        b"5\r\nabcdefgh\r\n0\r\n\r\n",
        b" 5\r\nabcde\r\n0\r\n\r\n",
    ):
        connection = await t.connect()
        lines = ("Transfer-Encoding: chunked", "Content-Type: application/json")
        await connection.send(t.request(b"%x\r\n%b\r\n" % (len(body), body) + chunks, *lines))
        try:
            answer = await within(6, connection.head(), f"neither an answer nor an end to {chunks[:20]!r}")
            check(answer.status >= 400, f"status {answer.status} for {chunks[:20]!r}")
        except (EOFError, ConnectionError):
            pass
    check(not [c for c in t.calls if c.body], "a body with malformed chunks reached the engine whole")


@case(
    AREA,
    "a header with a NUL, a bare CR, a line that is folded; a target with spaces; no Host",
    right="400 or a cut; nothing of it reaches the engine as another header",
    why="header injection",
    needs=(),
)
async def malformed_heads(t: Bench) -> None:
    good = t.request(t.body())
    line = b"X-Conformance: "
    for bad in (
        good.replace(line, b"X-A: a\x00b\r\n" + line),
        good.replace(line, b"X-A: a\rX-Injected: 1\r\n" + line),
        good.replace(line, b"X-A: a\r\n X-Injected: 1\r\n" + line),
        good.replace(line, b"X A: a\r\n" + line),
        good.replace(line, b": a\r\n" + line),
        good.replace(b" HTTP/1.1", b" x HTTP/1.1", 1),
        good.replace(b" HTTP/1.1", b" HTTP/9.9", 1),
        good.replace(b"POST ", b"PO ST ", 1),
        good.replace(b"Host: proxy\r\n", b""),
    ):
        connection = await t.connect()
        await connection.send(bad)
        with contextlib.suppress(EOFError, ConnectionError):
            await within(6, connection.head(), f"neither an answer nor an end to {bad[:60]!r}")
        connection.close()
    for call in t.calls:
        check(not call.header("x-injected"), "a header was injected")
        check(b"\x00" not in call.raw_head, "a NUL reached the engine")
        check(call.method == "POST" and " " not in call.target, f"{call.method} {call.target} reached the engine")


@case(
    AREA,
    "what is no HTTP at all",
    right="an error in OpenAI's shape, and the connection is closed",
    why="client libraries print the body's `error.message`",
    needs=(Claim.SLAI,),
)
async def malformed_is_told_in_openai_shape(t: Bench) -> None:
    for bad in (
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        connection = await t.connect()
        await connection.send(bad)
        answer = await within(6, connection.answer(), "no answer")
        equal(answer.status, 400, f"status for {bad!r}")
        equal(answer.content_type, "application/json", "content type")
        error = answer.json()["error"]
        equal(set(error), {"message", "type", "param", "code"}, "fields of the error")
        equal(error["type"], "invalid_request_error", "type")
        check(await connection.closed(), "the connection stays open")


@case(
    AREA,
    "`Expect: 100-continue`, the body held back",
    right="100, then the answer; the body reaches the engine whole",
    why="curl does it for bodies over 1 MB",
    needs=(),
)
async def expect_continue(t: Bench) -> None:
    body = t.body(stream=False)
    connection = await t.connect()
    whole = t.request(body, "Expect: 100-continue")
    await connection.send(whole[: -len(body)])
    interim = await within(5, connection.reader.readuntil(b"\r\n\r\n"), "no 100")
    check(interim.startswith(b"HTTP/1.1 100"), f"{interim[:40]!r} instead of 100")
    await connection.send(body)
    answer = await connection.answer()
    equal(answer.status, 200, "status")
    equal(len(t.calls), 1, "requests at the engine")
    check(t.token.encode() in t.calls[0].body, "the body did not reach the engine")


@case(
    AREA,
    "`Expect: 100-continue`, and the body is sent without waiting",
    right="served",
    why="clients wait for a second or not at all",
    needs=(),
)
async def expect_without_waiting(t: Bench) -> None:
    answer = await t.post(t.body(stream=False), "Expect: 100-continue")
    equal(answer.status, 200, "status")


@case(
    AREA,
    "a client of HTTP/1.0",
    right="no chunked coding; the end of the connection ends the stream",
    why="it cannot read chunks",
    needs=(),
)
async def client_of_http_1_0(t: Bench) -> None:
    t.stream(token("a"), last(), DONE)
    connection = await t.begin(t.body(), version="HTTP/1.0")
    answer = await connection.head()
    check(not answer.header("transfer-encoding"), "a Transfer-Encoding for a client of HTTP/1.0")
    body = await connection.reader.read()
    check(b"[DONE]" in body and body.endswith(b"\n\n"), f"the stream: {body[-80:]!r}")


@case(
    AREA,
    "an engine that answers in HTTP/1.0, with and without a length",
    right="the client gets it whole",
    why="simple engines and proxies before them do",
)
async def engine_of_http_1_0(t: Bench) -> None:
    for length in ("Content-Length: 5\r\n", ""):

        async def script(call: Seen, length: str = length) -> None:
            await call.send(f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n{length}\r\nhello".encode())
            call.close()

        t.script(script)
        answer = await t.post(t.body(stream=False))
        equal((answer.status, answer.body, answer.whole), (200, b"hello", True), "status, body and end")


@case(
    AREA,
    "an engine sends 103 and 102 before its answer",
    right="the answer comes; the others are passed or dropped",
    why="an interim answer taken for the answer breaks the connection",
    needs=(),
)
async def interim_answers(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n")
        await call.answer(b'{"choices":[{"index":0,"text":"a"}]}')

    t.script(script)
    answer = await t.post(t.body(stream=False))
    equal(answer.status, 200, "status")
    check(b"choices" in answer.body, f"the body: {answer.body!r}")


@case(
    AREA,
    "several requests in a row on one connection, sent at once",
    right="answered in order, each with its own",
    why="pipelining",
)
async def pipelining(t: Bench) -> None:
    t.script(lambda call: call.answer(call.body))
    bodies = [t.body(stream=False, user=str(number)) for number in range(5)]
    connection = await t.connect()
    await connection.send(b"".join(t.request(body) for body in bodies))
    for body in bodies:
        answer = await within(5, connection.answer(), "an answer is missing")
        equal(answer.body, body, "the answer")


@case(
    AREA,
    "a connection is used again after an answer, an error and a stream",
    right="it works",
    why="a rest of one answer must not be the start of the next",
)
async def connection_is_used_again(t: Bench) -> None:
    connection = await t.connect()
    t.script(lambda call: call.answer(b'{"error":{}}', status="400 Bad Request"))
    await connection.send(t.request(t.body(stream=False)))
    equal((await connection.answer()).status, 400, "status of the first")
    t.stream(token("a"), DONE)
    await connection.send(t.request(t.body()))
    equal((await connection.answer()).body, token("a") + DONE, "the second")
    t.script(lambda call: call.answer(b"third"))
    await connection.send(t.request(t.body(stream=False)))
    equal((await connection.answer()).body, b"third", "the third")


@case(
    AREA,
    "an engine closes its connection after each answer",
    right="the client's stays open",
    why="`Connection: close` is about one connection",
)
async def engine_closes_client_stays(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.answer(b"{}", headers=(*JSON, "Connection: close"))
        call.close()

    t.script(script)
    connection = await t.connect()
    for _ in range(3):
        await connection.send(t.request(t.body(stream=False)))
        equal((await connection.answer()).status, 200, "status")


@case(
    AREA,
    "an engine has closed an idle connection just before the next request",
    right="the request is served on another connection",
    why="what is sent into a closed connection was never read",
    needs=(Claim.RETRY,),
    alone=True,
    seconds=20,
)
async def keep_alive_race(t: Bench) -> None:
    async def script(call: Seen) -> None:
        # Reading from now on nothing, so that a request that comes too late stays unread.
        call.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await call.answer(b'{"choices":[]}')
        await closing.wait()
        call.close()
        call.gone.set()

    t.script(script)
    connection = await t.connect()
    for number in range(50):
        closing = asyncio.Event()
        await connection.send(t.request(t.body(stream=False)))
        equal((await connection.answer()).status, 200, f"status of request {number}")
        closing.set()
        await t.calls[-1].gone.wait()


@case(
    AREA,
    "an engine closes connections that were idle for 5 s; the next request comes after 4.9, 5.0 and 5.1 s",
    right="served",
    why="vLLM's server does so; a pool that keeps connections for longer runs into it",
    seconds=20,
)
async def keep_alive_timeout(t: Bench) -> None:
    async def script(call: Seen) -> None:
        served = call.line.requests
        await call.answer(b'{"choices":[]}')
        await asyncio.sleep(5)
        if served == call.line.requests:
            call.close()

    async def twice(idle: float) -> None:
        connection = await t.connect()
        await connection.send(t.request(t.body(stream=False)))
        equal((await connection.answer()).status, 200, "status of the first")
        await asyncio.sleep(idle)
        await connection.send(t.request(t.body(stream=False)))
        equal((await connection.answer()).status, 200, f"status of a request after {idle} s")

    t.script(script)
    await asyncio.gather(*(twice(4.9 + 0.02 * number) for number in range(11)))


@case(
    AREA,
    "an upload that takes its time, with a stated length and in chunks",
    right="the engine gets it whole",
    why="audio from phones",
    needs=(),
)
async def slow_upload(t: Bench) -> None:
    body = t.body(stream=False, pad="x" * 5000)
    for chunked in (False, True):
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        connection = await t.connect()
        await connection.send(t.request(b"", framing, "Content-Type: application/json"))
        for start in range(0, len(body), 500):
            piece = body[start : start + 500]
            await connection.send(chunk(piece) if chunked else piece)
            await asyncio.sleep(0.005)
        if chunked:
            await connection.send(b"0\r\n\r\n")
        answer = await connection.answer()
        equal(answer.status, 200, f"status ({framing})")
        check(b"x" * 5000 in t.calls[-1].body, "the body did not reach the engine whole")


@case(
    AREA,
    "a body in chunks of one byte, with extensions and trailers",
    right="the engine gets the same bytes",
    why="what frames it is the client's choice",
)
async def chunked_upload(t: Bench) -> None:
    body = t.body(stream=False)
    coded = b"".join(b"1;a=b\r\n%b\r\n" % body[i : i + 1] for i in range(len(body))) + b"0\r\nX-Sum: 1\r\n\r\n"
    answer = await t.post(coded, "Transfer-Encoding: chunked")
    equal(answer.status, 200, "status")
    equal(t.calls[0].body, body, "the body at the engine")
    framings = [*t.calls[0].header("transfer-encoding"), *t.calls[0].header("content-length")]
    equal(len(framings), 1, "framings of the request at the engine")


@case(
    AREA,
    "query strings, encoded characters in paths, double slashes and dots",
    right="the engine gets the target as it was sent",
    why="`?api-version=...` is how some clients call; a path that is tidied up is another path",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def targets_pass(t: Bench) -> None:
    for target in (
        f"{COMPLETIONS}?api-version=2024-10-21&x=a%20b+c&{t.token}",
        f"/v1/rerank?level=1&{t.token}",
        f"/v1/files/a%2Fb%20c/content?{t.token}",
        f"/x//y?{t.token}=%3D&empty=&q",
    ):
        await t.post(t.body(stream=False), path=target)
        equal(t.calls[-1].target, target, "the target")


@case(
    AREA,
    "a preflight (OPTIONS)",
    right="2xx with the engine's allow headers or the proxy's own",
    why="browsers ask before they send",
    needs=(),
)
async def preflight(t: Bench) -> None:
    lines = ("Access-Control-Allow-Origin: *", "Access-Control-Allow-Methods: POST")
    t.script(lambda call: call.send(head("204 No Content", *lines)))
    answer = await t.get(
        f"{CHAT}?{t.token}", "Origin: http://a.example", "Access-Control-Request-Method: POST", method="OPTIONS"
    )
    check(answer.status in (200, 204), f"status {answer.status}")
    check(answer.header("access-control-allow-origin"), "no Access-Control-Allow-Origin")


@case(AREA, "HEAD /health", right="200 and no body", why="load balancers probe so", needs=(Claim.LLM,))
async def head_of_health(t: Bench) -> None:
    answer = await t.get("/health", method="HEAD")
    check(answer.status in (200, 204), f"status {answer.status}")


@case(
    AREA,
    "HEAD with a Content-Length; 204 and 304 without a body",
    right="they pass, and the connection can be used again",
    why="there is no body whatever the length says",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def answers_without_a_body(t: Bench) -> None:
    connection = await t.connect()
    for method, first in (
        ("HEAD", "200 OK"),
        ("GET", "204 No Content"),
        ("GET", "304 Not Modified"),
        ("HEAD", "200 OK"),
    ):
        lines = ("ETag: x", "Content-Length: 500") if method == "HEAD" else ("ETag: x",)
        t.script(lambda call, first=first, lines=lines: call.send(head(first, *lines)))  # type: ignore[misc]
        await connection.send(t.request(None, path=f"/file?{t.token}", method=method))
        answer = await within(6, connection.head(), f"no answer to {method}, {first}")
        equal(answer.status, int(first[:3]), "status")
        equal(answer.header("etag"), ["x"], "ETag")


@case(AREA, "a redirect", right="it passes, and is not followed", why="it could lead anywhere")
async def redirects_are_not_followed(t: Bench) -> None:
    t.script(lambda call: call.answer(b"", status="307 Temporary Redirect", headers=(f"Location: /x?{t.token}",)))
    answer = await t.post(t.body(stream=False))
    equal(answer.status, 307, "status")
    equal(answer.header("location"), [f"/x?{t.token}"], "Location")
    equal(len(t.calls), 1, "requests at engines")


@case(
    AREA,
    "an absolute target, a target without a path, CONNECT",
    right="they lead to the engine or to a 4xx, nowhere else",
    why="a forward proxy into the inner network",
    needs=(),
)
async def targets_elsewhere(t: Bench) -> None:
    other = t.engines[1]
    before = len(other.strangers)
    for line in (
        f"CONNECT 127.0.0.1:{other.port} HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        f"GET http://127.0.0.1:{other.port}/secret-of-others HTTP/1.1",
    ):
        connection = await t.connect()
        await connection.send(f"{line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        try:
            answer = await within(5, connection.head(), f"no answer to {line}")
        except (EOFError, ConnectionError):
            continue
        check(not (line.startswith("CONNECT") and answer.status < 300), "CONNECT was accepted")
    del before


@case(
    AREA,
    "X-Request-Id of the client",
    right="it reaches the engine, and comes back",
    why="logs on both sides are joined by it",
    needs=(Claim.RELAY, Claim.LLM),
)
async def request_id(t: Bench) -> None:
    answer = await t.post(t.body(stream=False), "X-Request-Id: abc-DEF_1")
    equal(t.calls[0].header("x-request-id"), ["abc-DEF_1"], "at the engine")
    equal(answer.header("x-request-id"), ["abc-DEF_1"], "at the client")


@case(
    AREA,
    "an X-Request-Id with text that looks like another log line",
    right="replaced or escaped",
    why="log injection",
    needs=(Claim.SLAI,),
)
async def request_id_that_does_harm(t: Bench) -> None:
    for value in ("a%0d%0aERROR x", "<script>", "x" * 500, "a b", '{"a":1}'):
        answer = await t.post(t.body(stream=False), f"X-Request-Id: {value}")
        (found,) = answer.header("x-request-id")
        check(found != value and re.fullmatch(r"[\w-]{1,128}", found), f"{value[:20]!r} came back")
        equal(t.calls[-1].header("x-request-id"), [found], "at the engine")


@case(
    AREA,
    "traceparent and tracestate of the client",
    right="passed on once, or continued in the same trace",
    why="traces end at proxies that drop them",
)
async def traceparent(t: Bench) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    await t.post(t.body(stream=False), f"traceparent: 00-{trace}-b7ad6b7169203331-01", "tracestate: v=1")
    values = t.calls[0].header("traceparent")
    equal(len(values), 1, "number of traceparents at the engine")
    equal(values[0].split("-")[1], trace, "the trace")
    equal(t.calls[0].header("tracestate"), ["v=1"], "tracestate")


@case(
    AREA,
    "cookies that an engine sets for one client",
    right="another client's request does not carry them",
    why="a cookie jar in the proxy mixes clients up",
    needs=(),
)
async def cookies_are_not_shared(t: Bench) -> None:
    t.script(lambda call: call.answer(b'{"choices":[{"index":0,"text":"a"}]}', headers=(*JSON, "Set-Cookie: s=1")))
    await t.post(t.body(stream=False))
    await t.post(t.body(stream=False))
    check(not [c for c in t.calls if c.header("cookie")], "a cookie of one client came with the request of another")


@case(
    AREA,
    "150 requests at once, all of which the engine holds",
    right="all reach the engine",
    why="client libraries stop at 100 connections and queue behind them, unseen",
    needs=(),
    seconds=30,
)
async def many_at_once(t: Bench) -> None:
    count = 150
    all_there = asyncio.Event()

    async def script(call: Seen) -> None:
        if len(t.calls) == count:
            all_there.set()
        await all_there.wait()
        await call.answer(b'{"choices":[{"index":0,"text":"a"}]}')

    t.script(script)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(t.post(t.body(stream=False))) for _ in range(count)]
        try:
            await within(20, all_there.wait(), "they did not all reach an engine")
        finally:
            all_there.set()
    equal({task.result().status for task in tasks}, {200}, "statuses")


@case(
    AREA,
    "an engine answers before it has read the body, and closes",
    right="the answer reaches the client",
    why="413 and 401 come so",
    needs=(Claim.RELAY,),
)
async def answer_before_the_body(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.answer(
            b'{"error":{"message":"too large"}}', status="413 Content Too Large", headers=(*JSON, "Connection: close")
        )
        await read_body(call)  # a server that lingers, as they should
        call.close()

    t.script(script, early=True)
    answer = await t.post(t.body(stream=False, pad="x" * 500_000))
    equal((answer.status, json.loads(answer.body)), (413, {"error": {"message": "too large"}}), "status and body")


@case(
    AREA,
    "a WebSocket: a message before the engine has answered, one back, then the engine's close frame with 1011",
    right="messages, `OpenAI-Beta` and the code pass; both connections end",
    why="the realtime API; a code that is swallowed looks like a cut",
    needs=(Claim.WEBSOCKET,),
)
async def websocket_passes(t: Bench) -> None:
    got: list[tuple[int, bytes]] = []

    async def engine(call: Seen) -> None:
        assert call.reader is not None
        await asyncio.sleep(0.1)
        accept = base64.b64encode(hashlib.sha1(call.header("sec-websocket-key")[0].encode() + _GUID).digest())
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept.decode()}")
        await call.send(head("101 Switching Protocols", *upgrade))
        got.append(await _frame(call.reader))
        await call.send(b"\x81\x05hello" + b"\x88\x06\x03\xf3boom")
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            got.append(await _frame(call.reader))
        call.close()

    t.script(engine, early=True)
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "OpenAI-Beta: realtime=v1")
    key = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
    connection = await t.connect()
    await connection.send(t.request(None, *upgrade, key, path="/v1/realtime?model=m", method="GET") + _EARLY)
    answer = await within(5, connection.head(), "no answer")
    equal(answer.status, 101, "status")
    equal(await within(2, _frame(connection.reader), "no message"), (1, b"hello"), "the engine's message")
    equal(await within(2, _frame(connection.reader), "no close frame"), (8, b"\x03\xf3boom"), "the close frame")
    await connection.send(b"\x88\x82\0\0\0\0\x03\xf3")
    check(await connection.closed(5), "the client's connection stays open")
    await within(5, t.calls[0].finished.wait(), "the engine's connection stays open")
    equal(got[0], (1, b"early"), "what the engine got first")
    equal(t.calls[0].header("openai-beta"), ["realtime=v1"], "OpenAI-Beta")


@case(
    AREA,
    "a client asks for a WebSocket, sends a message ahead, and leaves (FIN, RST) before the engine has answered",
    right="the engine's connection is closed within 1 s",
    why="who does not read what is sent ahead does not see the end behind it",
    needs=(Claim.WEBSOCKET,),
)
async def websocket_client_leaves_early(t: Bench) -> None:
    async def engine(call: Seen) -> None:
        assert call.reader is not None
        with contextlib.suppress(ConnectionError):
            await call.reader.read()
        call.close()

    t.script(engine, early=True)
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    key = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
    for leave in ("close", "reset"):
        connection = await t.connect()
        await connection.send(t.request(None, *upgrade, key, path="/v1/realtime?model=m", method="GET") + _EARLY)
        call = await t.call()
        getattr(connection, leave)()
        await within(1, call.finished.wait(), f"the engine's connection stays open ({leave})")


_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_EARLY = b"\x81\x85\0\0\0\0early"


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read a short frame of a WebSocket; return its kind and what is in it."""
    first, length = await reader.readexactly(2)
    mask = await reader.readexactly(4) if length & 0x80 else bytes(4)
    data = await reader.readexactly(length & 0x7F)
    return first & 0x0F, bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))
