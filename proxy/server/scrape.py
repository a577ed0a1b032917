"""Answering whoever scrapes the metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.telemetry.metrics import exposed

if TYPE_CHECKING:
    from proxy.telemetry.metrics import Metrics


async def scraped(metrics: Metrics, request: web.Request) -> web.Response:
    """Answer with all metrics, in the format that is asked for: OpenMetrics has the traces behind measurements.

    They are read here, where the scheduler runs, and written down beside the loop.
    """
    body, content_type = await asyncio.to_thread(exposed, metrics.collect(), request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})
