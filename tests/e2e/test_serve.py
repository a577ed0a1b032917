"""``slai-proxy serve`` as a process of its own, from its first line to its exit code."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from itertools import count
from pathlib import Path

import aiohttp
import pytest
from serving_process import Process, serving, spawn

from proxy.configload import load_settings

pytestmark = pytest.mark.e2e

FAST = ("--sim-speed", "50")


def body_of(proxy: Process, max_tokens: int) -> bytes:
    """The printed body, with an answer of another length."""
    return json.dumps(json.loads(proxy.curl[-1]) | {"max_tokens": max_tokens}).encode()


JSON = {"Content-Type": "application/json"}


async def leaves_in_order(proxy: Process, client: aiohttp.ClientSession) -> None:
    """After SIGTERM it says that it is not ready, serves on for a while, and then does not listen any more."""
    async with asyncio.timeout(5):
        ready = 200
        while ready == 200:
            async with client.get(f"{proxy.url}/readyz") as response:
                ready = response.status
        async with client.post(f"{proxy.url}/v1/completions", data=body_of(proxy, 1), headers=JSON) as late:
            assert late.status == 200
            assert late.headers["Connection"] == "close"
            await late.read()
        with suppress(aiohttp.ClientConnectorError):
            while True:
                async with client.get(f"{proxy.url}/livez") as late:
                    assert late.status == 200


async def test_it_starts_does_what_it_prints_and_drains() -> None:
    async with serving(*FAST) as proxy, aiohttp.ClientSession() as client:
        rules = "2 of 2 engines (simulated ones: no --engines are given): policy spf, token budget 512, 128 sequences"
        assert any(line.endswith(rules) for line in proxy.said)
        # The printed line, as it stands.
        name, no_buffering, url, header_flag, header, data_flag, body = proxy.curl
        assert (name, no_buffering, header_flag, data_flag) == ("curl", "-N", "-H", "-d")
        assert url == f"{proxy.url}/v1/completions"
        key, _, value = header.partition(": ")
        async with client.post(url, data=body.encode(), headers={key: value}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert len(events) == json.loads(body)["max_tokens"] + 2
        assert any(line.startswith(f"Metrics: {proxy.url}/metrics") for line in proxy.said)
        async with client.get(f"{proxy.url}/metrics") as response:
            assert 'outcome="completed"} 1.0' in await response.text()
        async with client.get(f"{proxy.url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == [json.loads(body)["model"]]
        async with client.get(f"{proxy.url}/readyz") as response:
            assert response.status == 200

        # A second one cannot have the same port.
        port = proxy.url.rpartition(":")[2]
        other = await spawn("serve", "--port", port, "--log-level", "error", *FAST)
        assert other.stderr is not None
        said = (await other.stderr.read()).decode().splitlines()
        assert await other.wait() == 1
        (line,) = said
        assert line.startswith(f"slai-proxy: cannot listen on 127.0.0.1:{port}: ")
        assert line.endswith("address already in use; choose another --port")
        other = await spawn("serve", "--port", "0", "--debug-port", port, "--log-level", "error", *FAST)
        assert other.stderr is not None
        (line,) = (await other.stderr.read()).decode().splitlines()
        assert await other.wait() == 1
        assert line.startswith(f"slai-proxy: cannot listen on 127.0.0.1:{port}: ")
        assert line.endswith("address already in use; choose another --debug-port")

        # A stream in flight ends by itself after SIGTERM; what comes later is served as long as a load balancer may not
        # have seen that the proxy is not ready, and then refused.
        async with client.post(url, data=body_of(proxy, 6000), headers=JSON) as stream:
            received = await stream.content.readany()
            begun = time.monotonic()
            proxy.stop()
            await leaves_in_order(proxy, client)
            received += await stream.read()
        assert received.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in received
        await client.close()
        assert await proxy.exit_code() == 0
        assert time.monotonic() - begun < 8
        assert proxy.said[-1].endswith("stopped")
        assert not [line for line in proxy.said if "Traceback" in line]


@pytest.mark.parametrize(
    ("drain_seconds", "signals"), [("0.3", [signal.SIGTERM]), ("60", [signal.SIGTERM, signal.SIGINT])]
)
async def test_a_drain_ends_in_time_and_a_second_signal_ends_it_at_once(
    drain_seconds: str, signals: list[signal.Signals]
) -> None:
    async with (
        serving("--drain-seconds", drain_seconds, "--sim-engines", "1") as proxy,
        aiohttp.ClientSession() as client,
        client.post(f"{proxy.url}/v1/completions", data=body_of(proxy, 20_000), headers=JSON) as stream,
    ):
        await stream.content.readany()
        begun = time.monotonic()
        proxy.stop(signals[0])
        for number in signals[1:]:
            async with client.get(f"{proxy.url}/livez") as response:  # by its answer the first has been noticed
                assert response.status == 200
            proxy.stop(number)
        if signals[1:]:
            with pytest.raises(aiohttp.ClientError):
                await stream.read()
        else:  # there is time for a word
            last = (await stream.read()).split(b"\n\n")[-2]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        assert await proxy.exit_code() == 0
        assert time.monotonic() - begun < (1.8 if signals[1:] else 6)
        assert not [line for line in proxy.said if "Traceback" in line]


async def test_engines_that_are_not_there_are_told_and_not_fatal() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    flags = ("--engines", f"http://127.0.0.1:{port}", "--policy", "slai", "--tiles", "--max-num-seqs", "99")
    async with serving(*flags) as proxy, aiohttp.ClientSession() as client:
        rules = "0 of 1 engines: policy slai with tiles, token budget 2048, 99 sequences"
        assert any(line.endswith(rules) for line in proxy.said)
        assert any(line.strip() == f"http://127.0.0.1:{port} down" for line in proxy.said)
        async with client.post(proxy.curl[2], data=proxy.curl[-1].encode(), headers=JSON) as response:
            assert response.status == 503
        proxy.stop(signal.SIGINT)
        assert await proxy.exit_code() == 0


@asynccontextmanager
async def simulated_engine(*arguments: str) -> AsyncIterator[str]:
    """``slai-proxy engine`` on a free port; its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "engine", "--ports", "0", *arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            told = [(await process.stdout.readline()).decode().rstrip() for _ in range(2)]
        found = re.fullmatch(r"simulated engines at (http://\S+)", told[0])
        assert found is not None
        # The line below can be typed as it is.
        assert load_settings(shlex.split(told[1].partition(": slai-proxy serve ")[2]), "serve")[0].engines == (
            found[1],
        )
        yield found[1]
    finally:
        process.kill()
        await process.wait()


async def test_tiles_over_a_simulated_engine_find_each_other_cached() -> None:
    limits = ("--token-budget", "8192")
    async with (
        simulated_engine(*limits, "--speed", "2") as engine,
        serving("--engines", engine, "--tiles", *limits) as proxy,
        aiohttp.ClientSession() as client,
    ):
        url, strict = f"{proxy.url}/v1/completions", JSON | {"x-slo-tbt-ms": "100"}

        async def cached_share(prompt: object) -> float:
            body = {"model": "simulated", "prompt": prompt, "max_tokens": 1}
            async with client.post(url, json=body) as response:
                usage = (await response.json())["usage"]
            return float(
                usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"] / usage["prompt_tokens"]
            )

        async with client.post(url, data=body_of(proxy, 20_000), headers=strict) as running:
            await running.content.readany()
            most = {"text": 0.0, "ids": 0.0}
            numbers = count()
            async with asyncio.timeout(30):  # the proxy has to learn first how long steps take
                while min(most.values()) < 0.5:
                    fresh = [next(numbers) for _ in range(2)]
                    texts = ["".join(f"{n} is not {number}. " for n in range(1300)) for number in fresh]
                    ids = [list(range(number, number + 6000)) for number in fresh]
                    shares = await asyncio.gather(*map(cached_share, (*texts, *ids)))
                    # Slices bring all but the last piece, of texts by the ids that the engine tells.
                    most = {"text": max(most["text"], *shares[:2]), "ids": max(most["ids"], *shares[2:])}
        async with client.get(f"{proxy.url}/metrics") as response:
            told = (await response.text()).splitlines()
    found = dict(line.rsplit(" ", 1) for line in told if line.startswith("slai_slice"))
    assert float(found["slai_slices_total"]) >= 4
    hits, misses = (float(found[f'slai_slice_prefix_tokens_total{{cached="{c}"}}']) for c in ("yes", "no"))
    assert hits > 0

    assert misses == 0


async def test_debugging_and_the_decision_log_of_a_whole_life(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    arguments = ("--debug-port", "0", "--decision-log", str(log), "--state-dir", str(tmp_path / "state"))
    async with serving(*arguments, *FAST) as proxy, aiohttp.ClientSession() as client:
        assert proxy.said.count("slai-proxy: --state-dir is not used for simulated engines of our own") == 1
        (line,) = [line for line in proxy.said if line.startswith("Debug: ")]
        debug = line.split()[1]
        assert debug.startswith("http://127.0.0.1:")
        url, headers = f"{proxy.url}/v1/completions", JSON | {"x-request-id": "mine"}
        async with client.post(url, data=body_of(proxy, 20), headers=headers) as response:
            assert response.status == 200
            await response.read()
        async with client.get(line.split()[-1]) as response:
            assert (response.status, response.content_type) == (200, "text/html")
        async with client.get(debug) as response:
            assert len((await response.json())["engines"]) == 2
        async with client.get(debug.replace("/state", "/requests/mine")) as response:
            assert (await response.json())["outcome"] == "completed"

        # The port is taken now, which is told as for the main one.
        port = debug.split("/")[2].rpartition(":")[2]
        other = await spawn("serve", "--port", "0", "--debug-port", port, "--log-level", "error", *FAST)
        assert other.stderr is not None
        (said,) = (await other.stderr.read()).decode().splitlines()
        assert await other.wait() == 1
        assert port in said
        proxy.stop()
        assert await proxy.exit_code() == 0
    again = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "replay", str(log)),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": "77"},
    )
    _, told = await again.communicate()
    assert told.decode().endswith(" 1 decisions: all reproduced\n")
    assert again.returncode == 0
