"""Answering whoever scrapes the metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import ClientSession, ClientTimeout, UnixConnector, web

from proxy.telemetry.merging import merge
from proxy.telemetry.metrics import exposed

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.server.workers import Place
    from proxy.telemetry.metrics import Metrics

_ANSWER_SECONDS = 1.0
"""A process that does not tell in time what it counts is left out: it is starting, stuck or gone."""


async def scraped(metrics: Metrics, request: web.Request, place: Place | None = None) -> web.Response:
    """Answer with all metrics, in the format that is asked for: OpenMetrics has the traces behind measurements.

    What is the scheduler's is read here, where it runs; the rest is done beside the loop. ``place``: where this process
    is one of several, whose metrics are told together.
    """
    accept = request.headers.get("Accept", "")
    body, content_type = await asyncio.to_thread(exposed, metrics.collect(), accept)
    if place is not None:
        others = place.others()
        told = await asyncio.gather(*(_ask(path, accept) for path in others.values()))
        found = {place.number: body} | {n: text for n, text in zip(others, told, strict=True) if text is not None}
        body = await asyncio.to_thread(merge, {str(number): found[number] for number in sorted(found)})
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _ask(path: Path, accept: str) -> bytes | None:
    with suppress(OSError, TimeoutError):
        async with (
            ClientSession(connector=UnixConnector(str(path)), timeout=ClientTimeout(total=_ANSWER_SECONDS)) as session,
            session.get("http://worker/metrics", headers={"Accept": accept}) as answer,
        ):
            return await answer.read()
    return None
