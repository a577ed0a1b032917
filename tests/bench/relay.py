"""The relay that the proxy is measured against: aiohttp on both sides, and nothing else.

It schedules nothing, measures nothing and parses nothing. What it takes moves with the machine as the proxy's own
costs do, so the ratio of the two says something of the proxy alone.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web

_DROPPED = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


async def main(engine: str) -> None:
    async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
            body = await request.read()
            async with session.request(request.method, engine + request.path, data=body, headers=headers) as upstream:
                kept = {name: value for name, value in upstream.headers.items() if name.lower() not in _DROPPED}
                response = web.StreamResponse(status=upstream.status, headers=kept)
                await response.prepare(request)
                async for data in upstream.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        host, port, *_ = runner.addresses[0]
        print(f"relay listens on http://{host}:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
