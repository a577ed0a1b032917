"""docs/metrics.md: every metric, as a proxy shows it that has just begun."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.config import Settings
from proxy.core.fleet import Member
from proxy.core.scheduler import Scheduler
from proxy.server.app import PROXY, create_app
from proxy.server.notify import Notifier
from proxy.server.reload import Reloader
from proxy.telemetry.metrics import FleetCounts
from reference.markdown import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from proxy.telemetry.metrics.names import Name

_INTRODUCTION = """\
# Metrics

Made from the code by `make reference`. [What they are good for](observability.md), [dashboards and alerts](operations.md).

All are at `/metrics`; with `--otlp-endpoint` they are also sent by OpenTelemetry's name. A histogram has `_bucket` (with `le`), `_count` and
`_sum`. What labels can say is known beforehand: classes, engines and named tenants of the settings, models of the engines, and `other`."""
_SECTIONS = {
    "What clients see": (
        "gen_ai_",
        "slai_request",
        "slai_tbt",
        "slai_deadline",
        "slai_failures",
        "slai_tokens",
        "slai_streams",
    ),
    "The queue and the scheduler": ("slai_queue", "slai_release", "slai_decision", "slai_prompt"),
    "Engines": ("slai_engine",),
    "Tiles": ("slai_slice",),
    "Tenants": ("slai_tenant",),
    "Replicas that are one queue": ("slai_fleet",),
    "The proxy itself": ("slai_",),
}
_END = "`process_*` and `python_*` are those of `prometheus_client`: memory, processor time, open files, garbage collection."


def render() -> str:
    """Return the page."""
    names, families = asyncio.run(_shown())
    return "\n\n".join((_INTRODUCTION, *_sections(names, families), _END)) + "\n"


async def _shown() -> tuple[dict[str, Name], list[Metric]]:
    """What a proxy shows before an engine that is not there."""
    logging.disable()
    runner = web.AppRunner(create_app(Settings(engines=("http://127.0.0.1:1",))))
    await runner.setup()
    try:
        metrics = runner.app[PROXY].metrics
        metrics.watch_fleet(Member("", Scheduler()), FleetCounts())
        Reloader(Settings(), Settings, lambda *_: None, asyncio.Event(), Notifier()).tell(metrics)
        return metrics.names(), [*metrics.collect().collect()]
    finally:
        await runner.cleanup()
        logging.disable(logging.NOTSET)


def _sections(names: dict[str, Name], families: list[Metric]) -> Iterator[str]:
    rows: dict[str, list[list[str]]] = {title: [] for title in _SECTIONS}
    for family in sorted(families, key=lambda family: family.name):
        if (name := names.get(family.name)) is None:
            continue
        title = next(title for title, prefixes in _SECTIONS.items() if family.name.startswith(prefixes))
        shown = f"`{family.name}{'_total' if family.type == 'counter' else ''}`"
        labels = ", ".join(f"`{label}`" for label in name.prometheus_labels)
        rows[title].append([shown, family.type, labels, name.description, f"`{name.otel}`"])
    for title, found in rows.items():
        yield f"## {title}"
        yield table(("metric", "kind", "labels", "", "OpenTelemetry"), found)
