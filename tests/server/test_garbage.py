"""When full collections are made."""

import asyncio
import gc

import pytest
from live_proxy import live_proxy, raw_post
from scripted_engine import Call, scripted_engine, token
from virtual import run_in_virtual_time

from proxy.server import garbage


def collections_within(minutes: float, monkeypatch: pytest.MonkeyPatch, *, quiet: bool) -> list[float]:
    """When, in minutes."""
    made: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(gc, "collect", lambda: made.append(loop.time() / 60))
        task = loop.create_task(garbage.collect_when_quiet(lambda: quiet))
        await asyncio.sleep(60 * minutes + 1)
        task.cancel()

    run_in_virtual_time(main())
    return made


def test_every_quiet_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collections_within(3, monkeypatch, quiet=True) == pytest.approx([1, 2, 3])


def test_twice_an_hour_where_it_never_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collections_within(60, monkeypatch, quiet=False) == pytest.approx([30, 60])


def test_only_young_objects_are_looked_at_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = gc.get_threshold()
    full: list[int] = []
    note = lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None  # noqa: E731
    try:
        garbage.collect_young_only()
        gc.callbacks.append(note)
        kept = [[n] for n in range(500_000)]
        assert len(kept) == 500_000
        assert full == []
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@pytest.mark.parametrize("leaves", [False, True])
async def test_nothing_of_a_request_is_left_for_them(leaves: bool) -> None:
    async def stream(call: Call) -> None:
        await call.begin()
        await call.write(token())
        if leaves:
            await call.gone.wait()
        else:
            await call.end()

    async with scripted_engine(stream) as engine, live_proxy(engine) as proxy:

        async def ask() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(raw_post(b'{"model": "m", "prompt": "hello", "stream": true}'))
            await reader.readuntil(b"data: ")
            if not leaves:
                await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            await writer.wait_closed()

        await ask()
        await proxy.idle(1)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await ask()
            await proxy.idle(1)
            gc.collect()
            kinds = {f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert [kind for kind in kinds if kind.startswith(("proxy.", "aiohttp.", "httptools."))] == []
