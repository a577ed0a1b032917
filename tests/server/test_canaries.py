"""No text of a prompt or an answer and no key, wherever people may look: each is searched for a word of its own."""

import asyncio
import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from live_proxy import CHAT, COMPLETIONS, LiveProxy, exchange, live_proxy, raw_post
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_engine import DONE, Call, event, scripted_engine

from proxy.keys import KeySettings
from proxy.server.app import PROXY
from proxy.server.debug import create_debug_app
from proxy.telemetry.tracing import Tracing

WORD = "canary"
KEY = f"sk-{WORD}-client-key"
ENGINE_KEY = f"{WORD}-engine-key"
PROMPT = f"the {WORD} prompt"
ANSWER = f"the {WORD} answer"


async def every_kind_of_answer(call: Call) -> None:
    """By the order of the calls: streams, whole answers, errors, cuts, and things that are no HTTP."""
    body = call.body
    if b"cut" in body:
        await call.begin()
        await call.write(event({"choices": [{"text": ANSWER}]}))
        call.reset()
    elif b"broken" in body:
        await call.send(f"HTTP/1.1 {ANSWER}\r\n\r\n".encode())
        call.close()
    elif b"error" in body:
        await call.answer(json.dumps({"error": {"message": ANSWER}}).encode(), status="400 Bad Request")
    elif b'"stream": true' in body:
        await call.stream(event({"choices": [{"text": ANSWER, "delta": {"content": ANSWER}}]}), DONE)
    else:
        await call.answer(json.dumps({"choices": [{"text": ANSWER}], "usage": {"prompt_tokens": 3}}).encode())


def bodies() -> list[bytes]:
    good = [
        {"model": "m", "prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}], "user": PROMPT, "x": kind}
        for kind in ("plain", "cut", "broken", "error")
    ]
    bad: list[Any] = [
        {"model": "m", "prompt": {"a": PROMPT}, "stream": PROMPT},
        {"model": "m", "max_tokens": PROMPT, "prompt": PROMPT, "messages": PROMPT},
        [PROMPT],
        PROMPT,
    ]
    told = [json.dumps(g | {"stream": stream}).encode() for g in good for stream in (True, False)]
    return [*told, *(json.dumps(b).encode() for b in bad), b'{"prompt": "' + PROMPT.encode(), PROMPT.encode()]


async def ask_everything(proxy: LiveProxy) -> list[str]:
    """Ask in every way; return what the proxy itself told (bodies of errors) and all headers."""
    told: list[str] = []
    for path in (COMPLETIONS, CHAT, "/v1/embeddings", "/v1/messages", f"/v1/x?key={WORD}"):
        for body in bodies():
            for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": f"wrong-{WORD}"}):
                more = {"x-slo-class": "relaxed", "Cookie": f"session={WORD}", "X-Other": WORD}
                with suppress(aiohttp.ClientError):
                    async with proxy.post(path, body, headers=headers | more) as response:
                        data = (await response.read()).decode(errors="replace")
                        told.append(str(response.headers) + (data if response.status >= 400 else ""))
    wrong = (
        raw_post(b"{}", f"Authorization: Bearer {KEY}", f"X-A: {WORD}\x00"),
        raw_post(b"{}", f"Authorization: Bearer {KEY}", f"x-slo-tbt-ms: {WORD}"),
        raw_post(PROMPT.encode(), f"Authorization: Bearer {KEY}", "Content-Encoding: gzip"),
        f"POST {COMPLETIONS} {PROMPT}\r\n\r\n".encode(),
        raw_post(b"{}", f"X-Long: {WORD * 20_000}"),
        b"POST " + COMPLETIONS.encode() + f" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{WORD}\r\n".encode(),
    )
    return told + [(await exchange(proxy, request)).decode(errors="replace") for request in wrong]


def read_all(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.glob("decisions*"))


async def test_no_canary_is_seen_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for file, text in (("engine-key", ENGINE_KEY), ("debug-key", f"{WORD}-debug-key")):
        (tmp_path / file).write_text(text)
    exporter = InMemorySpanExporter()
    settings: dict[str, Any] = {
        "keys": {"k": KeySettings(sha256=hashlib.sha256(KEY.encode()).hexdigest(), tenant="acme")},
        "tenants": {"acme": {}},
        "engine_key_file": tmp_path / "engine-key",
        "debug_key_file": tmp_path / "debug-key",
        "decision_log": tmp_path / "decisions.jsonl",
        "debug_port": 0,
        "log_level": "debug",
    }
    tracing = Tracing(SimpleSpanProcessor(exporter))
    async with (
        scripted_engine(every_kind_of_answer) as engine,
        live_proxy(engine, tracing=tracing, **settings) as proxy,
    ):
        told = await ask_everything(proxy)
        parts = proxy.app[PROXY]
        # A fault of our own, with a traceback.
        parts.prober.models = None  # type: ignore[method-assign,assignment]
        async with proxy.client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 500
            told.append(await response.text())
        # Engines say so themselves where they are asked for a model that is not there: their words pass.
        ours = [text for text in told if ANSWER not in text]
        assert len(ours) > 80
        seen = {"answers": "".join(ours), "metrics": proxy.exposition(), "log": caplog.text}
        seen["spans"] = "".join(span.to_json() for span in exporter.get_finished_spans())
        runner = web.AppRunner(create_debug_app(parts), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        key = {"Authorization": f"Bearer {WORD}-debug-key"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}", headers=key) as client:
            for path in ("/debug/state", "/debug/config", "/metrics", *(f"/debug/requests/{n}" for n in range(30))):
                async with client.get(path) as response:
                    assert response.status == 200
                    seen[path] = await response.text()
        await runner.cleanup()
        assert engine.calls
        assert not [call for call in engine.calls if KEY in str(call.headers)]
    seen["decision log"] = await asyncio.to_thread(read_all, tmp_path)
    assert len(seen["decision log"]) > 1000
    assert len(seen["spans"]) > 1000
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    found = [
        place for place, text in seen.items() for word in (WORD, digest) if word in text.replace(str(tmp_path), "")
    ]
    assert found == []
    assert "failed through a fault of the proxy" in seen["log"], "there is something in it at all"
