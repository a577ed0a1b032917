"""The live page of the debug port: what goes on, once a second, for people who watch.

The page is one file without anything from elsewhere; it gets its data as server-sent events from ``/debug/events``,
one view for all who watch. What it shows is bounded, however long the queues are.
"""

from __future__ import annotations

import asyncio
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from proxy.core.fleet import Role
from proxy.core.request import Outcome
from proxy.core.tbt import slack_seconds
from proxy.telemetry.chronicle import Stage

if TYPE_CHECKING:
    from proxy.core.engine import EngineBelief
    from proxy.core.fleet import Member
    from proxy.server.app import Proxy
    from proxy.telemetry.chronicle import Chronicle, Story

PAGE_PATH = "/live"
EVENTS_PATH = "/debug/events"

_EVERY_SECONDS = 1.0
_MOST_ROWS = 40
_MOST_LOOKED_AT = 5000
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LivePage:
    """Serves the page and its events."""

    def __init__(self, proxy: Proxy, chronicle: Chronicle) -> None:
        self._proxy = proxy
        self._chronicle = chronicle
        self._made_at = float("-inf")
        self._event = b""

    async def page(self, _: web.Request) -> web.Response:
        body = files("proxy.server").joinpath("live.html").read_bytes()
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send a view every second until the reader leaves or the proxy drains to its end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            while True:
                await response.write(self._latest())
                await asyncio.sleep(_EVERY_SECONDS)
        except ConnectionError:
            return response  # to nobody

    def _latest(self) -> bytes:
        now = self._proxy.driver.now()
        if now - self._made_at >= _EVERY_SECONDS / 2:
            self._made_at = now
            self._event = b"data: " + msgspec.json.encode(view(self._proxy, self._chronicle, now)) + b"\n\n"
        return self._event


def view(proxy: Proxy, chronicle: Chronicle, now: float) -> dict[str, Any]:
    """Return what the page shows; times are in seconds."""
    scheduler = proxy.scheduler
    in_flight = list(islice(chronicle.in_flight(), _MOST_LOOKED_AT))
    waiting = [s for s in in_flight if s.stage in (Stage.READING, Stage.WAITING)]
    waited = _by_class(waiting, now)
    running = [s for s in in_flight if s.stage in (Stage.FIRST_TOKEN, Stage.STREAMING)]
    troubled = (s for s in islice(chronicle.last_ended(), _MOST_LOOKED_AT) if s.missed or _went_wrong(s))
    classes = proxy.settings.request_classes()
    counted = (scheduler.waiting, scheduler.waiting_tokens)
    if proxy.fleet is not None and proxy.fleet.member.role in (Role.FOLLOWER, Role.ROLL_CALL):  # another one's queue
        queued = [s for s in waiting if s.stage is Stage.WAITING]
        counted = (len(queued), sum(s.prompt_tokens or 0 for s in queued))
    return {
        "ready": proxy.ready,
        "draining": proxy.draining,
        "fleet": None if proxy.fleet is None else view_member(proxy.fleet.member),
        "waiting": counted[0],
        "waiting_tokens": counted[1],
        "in_flight": scheduler.dispatched,
        "outflow": scheduler.outflow_tokens_per_second,
        "tiles": proxy.settings.tiles,
        "engines": [_engine(engine) for engine in scheduler.engines],
        "classes": [
            {
                "name": name,
                "tbt": request_class.tbt_seconds,
                "ttft": request_class.ttft_seconds,
                "gaps": sum(proxy.metrics.tbt(name).counts),
                "late": dict(proxy.metrics.tbt(name).causes),
                **_waits(waited.get(name, [])),
            }
            for name, request_class in classes.items()
        ],
        "queue": [_waiting(story, now) for story in waiting[:_MOST_ROWS]],
        "streams": sorted((_running(story, now) for story in running), key=_left)[:_MOST_ROWS],
        "troubled": [_ended(story, now) for story in islice(troubled, _MOST_ROWS)],
    }


def _by_class(waiting: list[Story], now: float) -> dict[str, list[tuple[float, int]]]:
    """For how long who waits has done so, and the length of its prompt."""
    found: dict[str, list[tuple[float, int]]] = {}
    for story in waiting:
        if story.class_name is not None:
            found.setdefault(story.class_name, []).append((now - story.arrived_at, story.prompt_tokens or 0))
    return found


def _waits(waited: list[tuple[float, int]]) -> dict[str, Any]:
    if not waited:
        return {"waiting": 0, "waiting_tokens": 0, "waited_median": None, "waited_longest": None}
    seconds = sorted(s for s, _ in waited)
    return {
        "waiting": len(seconds),
        "waiting_tokens": sum(tokens for _, tokens in waited),
        "waited_median": seconds[len(seconds) // 2],
        "waited_longest": seconds[-1],
    }


def view_member(member: Member) -> dict[str, Any]:
    """Return who decides on a replica's requests."""
    return {"id": member.id, "role": member.role, "leader": member.leader, "replicas": member.replicas}


def _went_wrong(story: Story) -> bool:
    return story.outcome not in (None, Outcome.COMPLETED, Outcome.CLIENT_GONE)


def _engine(engine: EngineBelief) -> dict[str, Any]:
    model, capacity = engine.model, engine.limits.kv_tokens
    return {
        "id": engine.id,
        "condition": engine.health.condition if engine.up else "down",
        "plugin": engine.plugin,
        "requests": engine.outstanding,
        "slots": engine.limits.max_num_seqs,
        "decodes": engine.decodes,
        "backlog": engine.backlog,
        "sliced": engine.sliced,
        "kv": engine.kv_tokens / capacity if capacity else None,
        "step": engine.step_seconds,
        "slack": slack_seconds(engine) if engine.outstanding else None,
        "trusted": model.trusted,
        "error": model.prompt_errors.mean if model.trusted else None,
        "fixed": model.coefficients.fixed,
        "per_token": model.coefficients.per_prefill_token,
        "slices_found": engine.hit_rate.rate,
    }


def _waiting(story: Story, now: float) -> dict[str, Any]:
    return {
        "id": story.request_id,
        "class": story.class_name,
        "prompt": story.prompt_tokens,
        "waited": now - story.arrived_at,
        "ahead": max((m.tokens or 0 for m in story.moments if m.what == "slice sent"), default=0),
    }


def _running(story: Story, now: float) -> dict[str, Any]:
    report = story.report
    times = None if report is None else report.times
    last_at = None if times is None else times.last_at
    deadline = None if times is None else times.tbt_seconds
    return {
        "id": story.request_id,
        "class": story.class_name,
        "engine": story.engine_id,
        "prompt": story.prompt_tokens,
        "tokens": 0 if times is None else times.chunks,
        "longest": None if times is None or not times.gap_count else times.gap_max,
        "tbt": deadline,
        "slack": None if last_at is None or deadline is None else deadline - (now - last_at),
        "late": 0 if times is None else times.misses,
    }


def _left(stream: dict[str, Any]) -> float:
    slack: float | None = stream["slack"]
    return float("inf") if slack is None else slack


def _ended(story: Story, now: float) -> dict[str, Any]:
    return {
        "id": story.request_id,
        "class": story.class_name,
        "engine": story.engine_id,
        "ago": now - (story.ended_at or now),
        "outcome": story.outcome,
        "reason": story.reason,
        "missed": story.missed,
        "late": story.late,
        "longest": story.tbt_max_seconds,
    }
