"""LoRA adapters on a real vLLM: models of their own, which come and go."""

import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import MODEL, VENV
from live_proxy import LiveProxy, live_proxy, until
from real_engine import RealEngine

openai = pytest.importorskip("openai")
LENGTH = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
PROMPT = "Tell me of the sea."


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert VENV is not None
    assert MODEL is not None
    made = tmp_path_factory.mktemp("adapter")
    make = Path(__file__).with_name("make_adapter.py")
    subprocess.run([Path(VENV) / "bin" / "python", make, MODEL, made], check=True, timeout=120)
    return made


@pytest.fixture(scope="module")
def adapting(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """An engine that has the adapter ``sea``, and takes more."""
    assert VENV is not None
    assert MODEL is not None
    log = tmp_path_factory.mktemp("adapting") / "vllm.log"
    more = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"sea={adapter}")
    server = RealEngine(Path(VENV), Path(MODEL), log, *more)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def through(*engines: RealEngine, **settings: Any) -> AsyncIterator[tuple[LiveProxy, Any]]:
    more = {"probe_interval_seconds": 0.2, "token_budget": 2048, "max_num_seqs": 64} | settings
    async with (
        live_proxy(*(engine.url for engine in engines), **more) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield proxy, client


async def test_an_adapter_is_a_model_of_its_own(adapting: RealEngine) -> None:
    async with through(adapting) as (proxy, client):
        listed = {model.id: model for model in (await client.models.list()).data}
        assert set(listed) == {"tiny", "sea"}
        assert listed["sea"].parent == "tiny"
        answers = {}
        for model in listed:
            chat = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": PROMPT}], **LENGTH
            )
            assert chat.model == model
            stream = await client.completions.create(model=model, prompt=PROMPT, stream=True, **LENGTH)
            answers[model] = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        assert answers["tiny"] != answers["sea"], "the adapter is at work"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="lake", prompt=PROMPT, **LENGTH)
        await proxy.idle()
        assert proxy.outcomes() == {"completed": 4, "rejected": 1}, "scheduled, as any request"


async def test_requests_for_it_go_only_where_it_is(adapting: RealEngine, engine: RealEngine) -> None:
    before = engine.done(), adapting.done()
    async with through(engine, adapting) as (_, client):
        for _ in range(6):
            await client.completions.create(model="sea", prompt=PROMPT, **LENGTH)
    assert (engine.done(), adapting.done()) == (before[0], before[1] + 6)


async def test_slices_of_its_prompts_carry_its_name(adapting: RealEngine) -> None:
    """A prefix that was computed for another model is no prefix of this one: vLLM would not find it."""
    async with through(adapting, tiles=True) as (proxy, client):
        ids = [5 + i % 4000 for i in range(6000)]
        strict = await client.completions.create(
            model="sea",
            prompt=PROMPT,
            stream=True,
            max_tokens=6000,
            extra_headers={"x-slo-class": "strict"},
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(strict))
        whole = await client.completions.create(model="sea", prompt=ids, **LENGTH)
        await strict.close()
        slices = sum(proxy.samples("slai_slices_total").values())
        assert slices >= 2
        sent = sum(proxy.samples("slai_slice_tokens_total").values())
        cached = whole.usage.prompt_tokens_details.cached_tokens
        assert cached >= 0.9 * sent
        await proxy.idle(20)


async def test_adapters_come_and_go_while_it_runs(adapting: RealEngine, adapter: Path) -> None:
    load = {"lora_name": "lake", "lora_path": str(adapter)}
    async with through(adapting) as (proxy, client):
        async with proxy.post("/v1/load_lora_adapter", json.dumps(load).encode()) as refused:
            assert refused.status == 403, "it is not for everybody"
        assert "lake" not in [model.id async for model in client.models.list()]
    async with through(adapting, engine_administration=True) as (proxy, client):
        async with proxy.post("/v1/load_lora_adapter", json.dumps(load).encode()) as loaded:
            assert loaded.status == 200, await loaded.text()
        await until(lambda: any(model["id"] == "lake" for model in proxy.prober.models()))
        answer = await client.completions.create(model="lake", prompt=PROMPT, **LENGTH)
        assert answer.model == "lake"
        async with proxy.post("/v1/unload_lora_adapter", b'{"lora_name": "lake"}') as unloaded:
            assert unloaded.status == 200, await unloaded.text()
        await until(lambda: not any(model["id"] == "lake" for model in proxy.prober.models()))
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="lake", prompt=PROMPT, **LENGTH)
        assert (await client.completions.create(model="sea", prompt=PROMPT, **LENGTH)).model == "sea"
