"""The real engine, the proxy before it, and clients of that."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_proxy import LiveProxy, live_proxy
from real_engine import START_SECONDS, RealEngine

VENV, MODEL = os.environ.get("SLAI_REAL_VENV"), os.environ.get("SLAI_REAL_MODEL")

collect_ignore_glob = [] if VENV and MODEL else ["test_*.py"]  # see the README here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the time for an engine to start, which on a busy machine takes minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_SECONDS + 120))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    assert VENV is not None
    assert MODEL is not None
    server = RealEngine(Path(VENV), Path(MODEL), tmp_path_factory.mktemp("engine") / "vllm.log")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
async def proxy(engine: RealEngine) -> AsyncIterator[LiveProxy]:
    async with live_proxy(engine.url, probe_interval_seconds=0.5, token_budget=2048, max_num_seqs=64) as serving:
        yield serving


@pytest.fixture
async def openai_client(proxy: LiveProxy) -> AsyncIterator[Any]:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(proxy: LiveProxy) -> AsyncIterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def openai_sync(proxy: LiveProxy) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_sync(proxy: LiveProxy) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=proxy.url, api_key="none", max_retries=0) as client:
        yield client
