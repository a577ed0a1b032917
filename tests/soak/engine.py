"""An engine as a process of its own, which can be killed: some tokens to each request, at a few a hundredth second."""

from __future__ import annotations

import asyncio
import random
import sys

from scripted_engine import DONE, Call, ScriptedEngine, last, token, usage


async def answers(call: Call) -> None:
    """One token each few milliseconds until the proxy has left; sometimes a refusal, an error or nothing at all."""
    body = call.json()
    kind = random.random()
    if kind < 0.0005:
        await call.answer(b'{"error":{"message":"full"}}', status="503 Service Unavailable")
    elif kind < 0.02:
        await call.answer(b'{"error":{"message":"bad"}}', status="400 Bad Request")
    elif kind < 0.023:
        call.reset()
    elif not body["stream"]:
        await asyncio.sleep(0.004 * body["max_tokens"])
        await call.answer(b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}')
    else:
        await call.begin()
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.004)
            if call.gone.is_set():
                return
            await call.write(token())
        if kind < 0.03:
            call.reset()
            return
        await call.write(last() + usage(9, body["max_tokens"]) + DONE)
        await call.end()


async def main(port: int) -> None:
    engine = ScriptedEngine("m")
    engine.script = answers
    engine.port = port
    await engine.start()
    while True:
        await asyncio.sleep(1)
        engine.calls.clear()  # which it would keep for a test to look at


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
