"""Bodies, of requests and answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import TYPE_CHECKING

from scripted_engine import DONE, JSON, SSE, chunk, head, token

from conformance.suite import CHAT, COMPLETIONS, Bench, Claim, case, check, equal

if TYPE_CHECKING:
    from conformance.upstream import Seen

AREA = "Bodies"


@case(
    AREA,
    "unknown fields, repeated keys, 1e400, long integers, odd spaces, escapes, lone surrogates, NaN",
    right="the engine gets the same bytes",
    why="who parses and writes anew changes numbers, order and what a later key says",
)
async def request_byte_for_byte(t: Bench) -> None:
    name, model = t.token, t.model
    for body in (
        f'{{"model":"{model}","prompt":"{name}"}}'.encode(),
        f' \r\n\t{{ "model"  :\n"{model}" ,\t"prompt":"{name}"  }}  \n\n'.encode(),
        f'{{"model":"other","model":"{model}","prompt":"a","prompt":"{name}"}}'.encode(),
        f'{{"model":"{model}","prompt":"{name}","unknown":{{"deep":[1,{{"er":null}}]}},"n":1}}'.encode(),
        f'{{"model":"{model}","prompt":"{name}","x":1e400,"seed":123456789012345678901234567890}}'.encode(),
        f'{{"model":"{model}","prompt":"{name}","top_p":0.10000000000000000001,"min_p":1E-7,"x":-0.0}}'.encode(),
        f'{{"model":"{model}","prompt":"{name}\\u0000b\\/c\\ud800"}}'.encode(),
        f'{{"model":"{model}","prompt":"{name} 🙂 ünï"}}'.encode(),
        f'{{"mod\\u0065l":"{model}","prompt":"{name}","x":NaN}}'.encode(),
    ):
        answer = await t.post(body)
        equal(answer.status, 200, f"status for {body[:80]!r}")
        equal(t.calls[-1].body, body, "the body at the engine")


@case(
    AREA,
    "an answer in one piece with numbers, spaces and escapes of its own",
    right="the client gets the same bytes, and their true length",
    why="the same in the other direction",
)
async def answer_byte_for_byte(t: Bench) -> None:
    for body in (
        b'{ "choices" : [ ] ,"choices":[{"text":"a"}],\n "x": 1e400, "y": "\\ud800", "n": 12345678901234567890 }\n',
        b"",
        b"plain \x00\xff text",
        b'{"choices":[{"text":"' + b"x" * 3_000_000 + b'"}]}',
    ):
        t.script(lambda call, body=body: call.answer(body))  # type: ignore[misc]
        answer = await t.post(t.body(stream=False))
        equal(answer.body, body, "the body")
        equal(answer.content_type, "application/json", "content type")


@case(
    AREA,
    "an answer in one piece that comes in chunks",
    right="the client gets it whole",
    why="the framing is each connection's own",
)
async def answer_in_chunks(t: Bench) -> None:
    async def script(call: Seen) -> None:
        await call.begin(*JSON)
        for piece in (b'{"choices"', b":[{", b'"text":"a"}]}'):
            await call.write(piece)
        await call.end()

    t.script(script)
    answer = await t.post(t.body(stream=False))
    equal((answer.body, answer.whole), (b'{"choices":[{"text":"a"}]}', True), "the body and its end")


@case(
    AREA,
    "prompts as texts, token ids, lists of lists; contents as parts; stop as text or list; limits null or negative",
    right="accepted, and unchanged at the engine",
    why="the API allows them all; what is wrong is for the engine to say",
)
async def shapes_of_requests(t: Bench) -> None:
    for more in (
        {"prompt": [t.token, "b"]},
        {"prompt": [1, 2, 3], "user": t.token},
        {"prompt": [[1, 2], [3]], "user": t.token},
        {"prompt": [-1, 10**12], "user": t.token},
        {"prompt": t.token, "max_tokens": None, "stop": "x"},
        {"prompt": t.token, "max_tokens": -5, "stop": ["x", "y"], "n": 3, "best_of": 4},
        {"prompt": t.token, "echo": True, "logit_bias": {"50256": -100}, "guided_json": {"type": "object"}},
    ):
        body = json.dumps({"model": t.model, **more}).encode()
        answer = await t.post(body)
        equal((answer.status, t.calls[-1].body), (200, body), f"status, and the body at the engine, of {more}")
    parts = [{"type": "text", "text": t.token}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    for message in (
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": t.token}}]},
        {"role": "tool", "content": t.token, "tool_call_id": "c"},
    ):
        body = json.dumps({"model": t.model, "messages": [message], "tools": [{"type": "function"}]}).encode()
        answer = await t.post(body, path=CHAT)
        equal((answer.status, t.calls[-1].body), (200, body), f"status, and the body at the engine, of {message}")


@case(
    AREA,
    "bodies of 129 KB, 1.1 MB, 2.1 MB and 8 MB",
    right="they reach the engine",
    why="default limits of servers are 64 KB to 1 MB",
    needs=(),
    seconds=20,
)
async def large_requests(t: Bench) -> None:
    for size in (129_000, 1_100_000, 2_100_000, 8_000_000):
        body = t.body(stream=False, prompt=f"{t.token} " + "x" * size)
        answer = await t.post(body)
        equal(answer.status, 200, f"status for {size} bytes")
        check(len(t.calls[-1].body) >= size, f"{len(t.calls[-1].body)} of {size} bytes reached the engine")


@case(
    AREA,
    "what is no JSON object: `{bad`, `[]`, a text, null, nothing, 100,000 `[`, not UTF-8",
    right="4xx in OpenAI's shape (the proxy's or the engine's), and the proxy goes on",
    why="a 500 makes clients try again, and a recursion can end the process",
    needs=(Claim.LLM,),
)
async def bodies_that_are_no_requests(t: Bench) -> None:
    engine_error = b'{"error":{"message":"bad","type":"BadRequestError","param":null,"code":400}}'
    t.script(lambda call: call.answer(engine_error, status="400 Bad Request"))
    for body in (b"{bad", b"[]", b'"x"', b"null", b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00"):
        for path in (COMPLETIONS, CHAT):
            answer = await t.post(body, path=f"{path}?{t.token}")
            check(400 <= answer.status < 500, f"status {answer.status} for {body[:20]!r}")
            check(isinstance(answer.json()["error"]["message"], str), f"no error object for {body[:20]!r}")


@case(
    AREA,
    "wrong types of the fields that a scheduler reads: model, stream, max_tokens",
    right="4xx in OpenAI's shape that names the field",
    why="never an exception of the proxy",
    needs=(Claim.SLAI,),
)
async def fields_of_wrong_types(t: Bench) -> None:
    wrong: dict[str, list[object]] = {"model": [5, []], "stream": ["yes", 1], "max_tokens": ["many", 1.5, True]}
    for field, values in wrong.items():
        for value in values:
            answer = await t.post(json.dumps({**json.loads(t.body()), field: value}).encode())
            equal(answer.status, 400, f"status for {field}={value!r}")
            equal(answer.json()["error"]["param"], field, "param")


@case(
    AREA,
    "a compressed answer",
    right="raw with its Content-Encoding, or inflated without it",
    why="a header that does not fit its body breaks every client",
    needs=(),
)
async def compressed_answer(t: Bench) -> None:
    plain = b'{"id":"x","object":"text_completion","model":"m","choices":[{"index":0,"text":"abc"}]}'
    packed = gzip.compress(plain)
    t.script(lambda call: call.answer(packed, headers=(*JSON, "Content-Encoding: gzip")))
    answer = await t.post(t.body(stream=False), "Accept-Encoding: gzip")
    found = gzip.decompress(answer.body) if answer.header("content-encoding") == ["gzip"] else answer.body
    equal(json.loads(found)["choices"][0]["text"], "abc", "the text")


@case(
    AREA,
    "a stream that an engine compresses although it was not asked to",
    right="the same bytes with their Content-Encoding",
    why="the two belong together",
)
async def compressed_stream(t: Bench) -> None:
    packer = zlib.compressobj(wbits=31)
    pieces = [packer.compress(token("a")) + packer.flush(zlib.Z_SYNC_FLUSH), packer.compress(DONE) + packer.flush()]

    async def script(call: Seen) -> None:
        await call.send(head("200 OK", *SSE, "Content-Encoding: gzip", "Transfer-Encoding: chunked"))
        for piece in pieces:
            await call.send(chunk(piece))
        await call.end()

    t.script(script)
    answer = await t.post(t.body(), "Accept-Encoding: gzip")
    found = gzip.decompress(answer.body) if answer.header("content-encoding") == ["gzip"] else answer.body
    equal(found, token("a") + DONE, "the stream, inflated")


@case(
    AREA,
    "a compressed request",
    right="the engine gets the same bytes with their Content-Encoding",
    why="the same; and only the engine knows whether it can read it",
)
async def compressed_request(t: Bench) -> None:
    plain = t.body(stream=False)
    for path in (COMPLETIONS, "/v1/embeddings"):
        for coding, packed in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
            answer = await t.post(packed, f"Content-Encoding: {coding}", path=path)
            equal(answer.status, 200, "status")
            equal(t.calls[-1].header("content-encoding"), [coding], "Content-Encoding at the engine")
            equal(t.calls[-1].body, packed, "the body at the engine")


@case(
    AREA,
    "a request that says it is compressed and is not; one of 300 KB that inflates to 64 MB",
    right="4xx (the proxy's or the engine's), soon, and the proxy goes on",
    why="a decompression bomb",
    needs=(Claim.LLM,),
)
async def compressed_request_that_is_none(t: Bench) -> None:
    t.script(lambda call: call.answer(b'{"error":{"message":"bad"}}', status="400 Bad Request"))
    bomb = await asyncio.to_thread(gzip.compress, b'{"model": "' + b"m" * (64 << 20), 1)
    for body in (b"no gzip", bomb):
        answer = await t.post(body, "Content-Encoding: gzip", path=f"{COMPLETIONS}?{t.token}")
        check(400 <= answer.status < 500, f"status {answer.status}")


@case(
    AREA,
    "multipart audio with NUL bytes, with a length and in chunks",
    right="the engine gets the same bytes, type and boundary",
    why="forms that are read and built anew change boundaries and lengths",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def multipart(t: Bench) -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + bytes(range(256)) * 300
        + b"\r\n--x--\r\n"
    )
    kind = "Content-Type: multipart/form-data; boundary=x"
    for coded, framing in (
        (form, f"Content-Length: {len(form)}"),
        (chunk(form[:999]) + chunk(form[999:]) + b"0\r\n\r\n", "Transfer-Encoding: chunked"),
    ):
        answer = await t.post(coded, kind, framing, path=f"/v1/audio/transcriptions?{t.token}")
        equal(answer.status, 200, f"status ({framing})")
        equal(t.calls[-1].body, form, "the body at the engine")
        equal(t.calls[-1].header("content-type"), ["multipart/form-data; boundary=x"], "Content-Type")


@case(
    AREA,
    "an engine's errors 400, 401, 404, 413, 422, 500, where a stream was asked for and where not",
    right="status, type and body pass; not wrapped, not sent again",
    why="client libraries raise by them",
)
async def engine_errors_pass(t: Bench) -> None:
    body = b'{"object":"error","error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    for status in ("400 Bad Request", "401 Unauthorized", "404 Not Found", "413 Too Large", "422 X", "500 Oops"):
        for stream in (True, False):
            before = len(t.calls)
            t.script(lambda call, status=status: call.answer(body, status=status, headers=(*JSON, "X-Why: 1")))  # type: ignore[misc]
            answer = await t.post(t.body(stream=stream))
            equal((answer.status, answer.body), (int(status[:3]), body), "status and body")
            equal((answer.content_type, answer.header("x-why")), ("application/json", ["1"]), "headers")
            equal(len(t.calls) - before, 1, "times that it was sent")


@case(
    AREA,
    "`stream_options` with `stream: false`, sent by the client",
    right="as it came: the engine's 400 reaches the client",
    why="only who turns a stream off has to take them out",
)
async def stream_options_without_stream(t: Bench) -> None:
    t.script(lambda call: call.answer(b'{"error":{"message":"no"}}', status="400 Bad Request"))
    body = t.body(stream=False, stream_options={"include_usage": True})
    answer = await t.post(body)
    equal((answer.status, t.calls[0].body), (400, body), "status, and the body at the engine")


@case(
    AREA,
    "a body with a path that no engine and no proxy knows, and with methods other than POST",
    right="it reaches the engine as it came",
    why="APIs grow faster than proxies",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def unknown_paths_pass(t: Bench) -> None:
    for method in ("PUT", "PATCH", "DELETE", "POST"):
        body = f"\x00{t.token}\r\n".encode()
        answer = await t.post(body, "Content-Type: x/y", path="/v9/new/thing", method=method)
        equal(answer.status, 200, f"status for {method}")
        call = t.calls[-1]
        equal((call.method, call.target, call.body), (method, "/v9/new/thing", body), "what the engine got")


@case(
    AREA,
    "embeddings, responses, messages, rerank, score, tokenize",
    right="they reach the engine as they came, and the answer comes back so",
    why="the rest of the API",
)
async def other_apis_pass(t: Bench) -> None:
    t.script(lambda call: call.answer(b'{"ok": 1.0}'))
    for path in ("/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score", "/tokenize", "/pooling"):
        body = json.dumps(
            {"model": t.model, "input": t.token, "messages": [{"role": "user", "content": t.token}]}
        ).encode()
        answer = await t.post(body, path=path)
        equal((answer.status, answer.body), (200, b'{"ok": 1.0}'), f"{path}: answer")
        equal(t.calls[-1].body, body, f"{path}: body at the engine")


@case(
    AREA,
    "GET with a body, DELETE with a body, POST without one",
    right="the engine gets what was sent",
    why="unusual, and allowed",
    needs=(Claim.RELAY, Claim.PATHS),
)
async def bodies_of_other_methods(t: Bench) -> None:
    for method in ("GET", "DELETE"):
        await t.post(t.body(), path=f"/x?{t.token}", method=method)
        check(t.token.encode() in t.calls[-1].body, f"the body of {method} was lost")
    answer = await t.post(b"", path=f"/x?{t.token}")
    equal((answer.status, t.calls[-1].body), (200, b""), "status, and the body at the engine")


@case(
    AREA,
    "the answer to a stream request is no stream",
    right="it passes with its own type",
    why="engines that cannot stream, and errors",
)
async def whole_answer_to_a_stream_request(t: Bench) -> None:
    t.script(lambda call: call.answer(b'{"choices":[{"text":"a"}]}'))
    answer = await t.post(t.body())
    equal((answer.body, answer.content_type), (b'{"choices":[{"text":"a"}]}', "application/json"), "body and type")


@case(
    AREA,
    "the model does not exist",
    right="404 in OpenAI's shape with the code model_not_found, or the engine's own",
    why="client libraries look at it",
    needs=(Claim.SLAI,),
)
async def unknown_model(t: Bench) -> None:
    answer = await t.post(t.body(model="nobody's"))
    equal(answer.status, 404, "status")
    equal(answer.json()["error"]["code"], "model_not_found", "code")
