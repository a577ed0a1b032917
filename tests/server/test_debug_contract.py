"""The debug port against its own OpenAPI description: requests made from it, valid and not, and answers checked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, assume, settings
from live_proxy import LiveProxy, live_proxy
from scripted_engine import scripted_engine

from proxy.server.app import PROXY
from proxy.server.debug import create_debug_app
from proxy.server.debug_openapi import description

schemathesis = pytest.importorskip("schemathesis")  # make contract

KEY = "key-of-the-debug-port"
schema = schemathesis.openapi.from_dict(description(needs_key=True))


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[str]:
    (tmp_path / "key").write_text(KEY)
    async with (
        scripted_engine() as engine,
        live_proxy(engine, debug_port=0, debug_key_file=tmp_path / "key") as proxy,
    ):
        await some_requests(proxy)
        runner = web.AppRunner(create_debug_app(proxy.app[PROXY]), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


async def some_requests(proxy: LiveProxy) -> None:
    assert (await proxy.fetch(headers={"x-request-id": "a"}))[0] == 200
    assert (await proxy.fetch(body=b"no json", headers={"x-request-id": "b"}))[0] == 400


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread of its own: the requests are made by a library that blocks."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever, name="debug port")
    thread.start()

    try:
        entering = stack.enter_async_context(served(tmp_path_factory.mktemp("debug")))
        yield asyncio.run_coroutine_threadsafe(entering, loop).result(20)
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_of_those_described(case: Any, url: str) -> None:
    # A client resolves these itself, and asks for the directory above.
    assume(str((case.path_parameters or {}).get("id", "x")).strip() not in (".", "..", "", "/"))
    case.call_and_validate(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=10)


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_without_the_key_no_answer_but_that_it_is_needed(case: Any, url: str) -> None:
    response = case.call(base_url=url, timeout=10)
    assert response.status_code in ((200, 405) if case.path in ("/live", "/livez", "/readyz") else (401,))
