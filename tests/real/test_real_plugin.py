"""Our scheduler inside a real vLLM: the proxy knows of it, and what vLLM can do it still can."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_proxy import LiveProxy, live_proxy
from real_engine import RealEngine

from proxy.core.plugin import PluginPolicy

VENV, MODEL = os.environ.get("SLAI_REAL_VENV"), os.environ.get("SLAI_REAL_MODEL")

pytestmark = pytest.mark.timeout(400)
SHAPE = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f("},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "The sea"}]},
    "/v1/responses": {"input": "The sea", "max_output_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "The sea"}]},
}


def engine_with(directory: Path, policy: str, *flags: str) -> RealEngine:
    assert VENV is not None
    assert MODEL is not None
    return RealEngine(Path(VENV), Path(MODEL), directory / "vllm.log", *flags, plugin=policy)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """An engine with ``deadline`` and an adapter."""
    directory = tmp_path_factory.mktemp("planned")
    python, maker = f"{VENV}/bin/python", Path(__file__).with_name("make_adapter.py")
    subprocess.run([python, maker, str(MODEL), directory / "adapter"], check=True)
    flags = "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapted={directory / 'adapter'}"
    server = engine_with(directory, "deadline", *flags)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
async def before(planned: RealEngine) -> AsyncIterator[LiveProxy]:
    async with live_proxy(planned.url, probe_interval_seconds=0.5, token_budget=2048, max_num_seqs=64) as proxy:
        yield proxy


async def ask(proxy: LiveProxy, path: str = "/v1/completions", **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0} | BODIES[path] | fields
    if path == "/v1/responses":
        del body["max_tokens"]
    patience = aiohttp.ClientTimeout(total=120)  # engines here share two cores with everything else
    status, answer = await proxy.fetch(
        path, json.dumps(body).encode(), headers={"x-slo-class": "strict"}, timeout=patience
    )
    assert status == 200, answer
    return json.loads(answer)


async def test_the_proxy_knows_of_it(before: LiveProxy, planned: RealEngine) -> None:
    assert before.scheduler.engines[0].plugin is PluginPolicy.DEADLINE
    assert before.samples("slai_engine_plugin") == {(planned.url, "deadline"): 1}


@pytest.mark.parametrize("path", list(BODIES))
async def test_it_takes_deadlines_by_each_api(before: LiveProxy, path: str) -> None:
    assert await ask(before, path)


async def test_cached_prefixes_are_found(before: LiveProxy) -> None:
    prompt = "the quick brown fox " * 60
    first = await ask(before, prompt=prompt)
    again = await ask(before, prompt=prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


async def test_shapes_are_kept_beside_long_prompts(before: LiveProxy) -> None:
    long = (ask(before, prompt="x " * 3000, max_tokens=4) for _ in range(4))
    shaped = (ask(before, structured_outputs={"json": SHAPE}, max_tokens=64) for _ in range(8))
    answers = await asyncio.gather(*long, *shaped)
    for answer in answers[4:]:
        assert json.loads(answer["choices"][0]["text"])["unit"] in ("c", "f")


async def test_adapters_work(before: LiveProxy) -> None:
    """One after the other: a stock vLLM for CPUs, too, mixes them up with the model's own in one step."""
    said = []
    for model in ("tiny", "adapted"):
        long = (ask(before, model=model, prompt="x " * 3000, max_tokens=2) for _ in range(3))
        short = (ask(before, model=model, prompt="def f(", max_tokens=16) for _ in range(5))
        answers = (await asyncio.gather(*long, *short))[3:]
        said.append({answer["choices"][0]["text"] for answer in answers})
    assert said[0].isdisjoint(said[1])


async def test_long_prompts_beside_decodes_leave_no_fault_and_nothing_behind(
    before: LiveProxy, planned: RealEngine
) -> None:
    decodes = [ask(before, max_tokens=100, ignore_eos=True, vllm_xargs={"slai_tbt_ms": 60_000}) for _ in range(10)]
    prompts = [ask(before, prompt=f"{n} " * 2000, max_tokens=1) for n in range(8)]
    await asyncio.gather(*decodes, *prompts)
    assert await asyncio.to_thread(planned.figure, "slai_plugin_steps") > 0
    assert await asyncio.to_thread(planned.figure, "slai_plugin_info") == 1, "no fault has ended it"
    assert await asyncio.to_thread(planned.running) == 0


async def test_speculation_works(tmp_path: Path) -> None:
    method = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = engine_with(tmp_path, "slai", "--speculative-config", json.dumps(method))
    await asyncio.to_thread(engine.start)
    try:
        async with live_proxy(engine.url, token_budget=2048, max_num_seqs=64) as proxy:
            short = [ask(proxy, prompt="a b c d " * 20, max_tokens=60, ignore_eos=True) for _ in range(10)]
            long = [ask(proxy, prompt=f"{n} " * 2000, max_tokens=2, ignore_eos=True) for n in range(6)]
            answers = await asyncio.gather(*short, *long)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [60] * 10 + [2] * 6
        assert await asyncio.to_thread(engine.figure, "vllm:spec_decode_num_draft_tokens_total") > 0
        assert await asyncio.to_thread(engine.figure, "slai_plugin_info") == 1
    finally:
        engine.stop()


async def test_pipeline_parallelism_is_refused_with_a_reason(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, "deadline", "--pipeline-parallel-size", "2")
    try:
        with pytest.raises(AssertionError, match="vLLM does not start"):
            await asyncio.to_thread(engine.start)
        assert "slai cannot schedule an engine with pipeline parallelism" in engine.said()
    finally:
        engine.stop()
