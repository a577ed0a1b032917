"""Tenants through the whole proxy: whose share a request comes out of, and what of it shows."""

import asyncio
import hashlib

from live_proxy import live_proxy, until
from scripted_engine import DONE, Call, last, scripted_engine, token

KEY = "sk-very-secret"


async def answer(call: Call) -> None:
    await call.stream(token(), last(), DONE)


async def test_a_tenant_that_comes_late_does_not_wait_behind_all_of_one_that_floods() -> None:
    """One sequence at a time: of b's ten requests one runs and nine wait when a's only one comes."""
    go = asyncio.Event()
    order: list[str] = []

    async def script(call: Call) -> None:
        order.append(*call.header("X-Request-Id"))
        await go.wait()
        await answer(call)

    async with scripted_engine(script) as engine, live_proxy(engine, max_num_seqs=1, tenants_from="key") as proxy:

        async def ask(name: str, key: str) -> None:
            await proxy.fetch(headers={"X-Request-Id": name, "Authorization": f"Bearer {key}"})

        async with asyncio.TaskGroup() as group:
            for n in range(10):
                group.create_task(ask(f"b{n}", "key-of-b"))
            await until(lambda: proxy.scheduler.waiting == 9 and order)
            group.create_task(ask("a", "key-of-a"))
            await until(lambda: proxy.scheduler.waiting == 10)
            go.set()
        await proxy.idle()
    assert order.index("a") <= 1


async def test_named_tenants_have_metrics_and_all_others_share_one_label() -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    async with (
        scripted_engine(answer) as engine,
        live_proxy(engine, tenants={"acme": {"weight": 2, "key_sha256": [digest]}}) as proxy,
    ):
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": "k1"}, {"x-api-key": "k2"}, {}):
            assert (await proxy.fetch(headers=headers))[0] == 200
        await proxy.idle()
        requests = proxy.samples("slai_tenant_requests_total")
        assert requests == {("completed", "acme"): 1, ("completed", "other"): 3}
        assert proxy.samples("slai_tenant_tokens_total")["output", "acme"] == 1
        shown = proxy.exposition()
        assert KEY not in shown
        assert digest not in shown


async def test_a_tenant_of_no_plain_name_is_refused_where_the_header_is_trusted() -> None:
    async with scripted_engine(answer) as engine, live_proxy(engine, tenants_from="header") as proxy:
        assert (await proxy.fetch(headers={"x-slai-tenant": "a b"}))[0] == 400
        assert (await proxy.fetch(headers={"x-slai-tenant": "acme"}))[0] == 200
