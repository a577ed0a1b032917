"""Watching engines: is it healthy, which models does it serve, how large and how full is its KV cache?

Each engine has its own loop, so that a slow one delays no other, and no request ever waits for a probe.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx

from proxy.core.events import EngineDown, EngineRemoved, EngineReported, EngineUp
from proxy.core.limits import CacheConfig, EngineLimits
from proxy.upstream.credentials import EngineTrust
from proxy.upstream.figures import read_cache_config, read_plugin, read_report
from proxy.upstream.knowledge import Knowledge, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.engine import EngineBelief
    from proxy.core.plugin import PluginPolicy

_log = logging.getLogger(__name__)

_FAILURES_UNTIL_DOWN = 2
"""One slow answer of a busy server is no outage; a refused connection is one at once."""

_MAX_MODELS = 1000
_MAX_BYTES = 4 << 20
"""No answer to a probe is read further: vLLM's /metrics are some hundred kilobytes."""


@dataclass(slots=True)
class EngineProbe:
    """What the probe of one engine has found so far."""

    base_url: str
    up: bool = False
    models: list[dict[str, Any]] = field(default_factory=list)
    """Entries of its ``/v1/models``, as it sent them."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    plugin: PluginPolicy | None = None
    """By which of our rules it composes its steps itself, as it last said."""
    version: str = ""
    """What it says that it runs, if anybody asked."""
    fingerprint: str = ""
    """What tells it from other engines; see ``knowledge``."""
    failures: int = 0
    announced: EngineUp | EngineDown | None = None
    reports: bool = False
    """Whether it told its own figures when last asked."""


Announce = Callable[[EngineUp | EngineDown | EngineReported | EngineRemoved], None]


class Prober:
    """Probes every engine at a fixed interval and announces what changes."""

    def __init__(
        self,
        base_urls: tuple[str, ...],
        limits: Callable[[CacheConfig], EngineLimits],
        announce: Announce,
        *,
        interval_seconds: float,
        knowledge: Knowledge | None = None,
        tiles: bool = False,
        trust: EngineTrust | None = None,
    ) -> None:
        """``tiles``: prompts are to be cut, for which an engine must cache prefixes."""
        self._trust = trust or EngineTrust()
        self.probes = [EngineProbe(url) for url in base_urls]
        self._group: asyncio.TaskGroup | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.limits = limits
        self._announce = announce
        self._knowledge = knowledge
        self._tiles = tiles
        self._interval_seconds = interval_seconds
        self._timeout_seconds = max(2.0, interval_seconds)
        self._client = self._make_client()

    async def run(self) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for probe in self.probes:
                self._begin(probe, group)
            await asyncio.Event().wait()  # there may be no engine yet, and more may come

    def add(self, base_url: str) -> None:
        """Probe one engine more, from now on if the prober runs; it is announced when it has been looked at."""
        if any(probe.base_url == base_url for probe in self.probes):
            return
        probe = EngineProbe(base_url)
        self.probes.append(probe)
        if self._group is not None:
            self._begin(probe, self._group)

    def remove(self, base_url: str, drain_seconds: float) -> None:
        """Look at an engine no more, and announce that it is removed; unknown ones are ignored."""
        found = [probe for probe in self.probes if probe.base_url == base_url]
        for probe in found:
            self.probes.remove(probe)
            if (watch := self._watches.pop(base_url, None)) is not None:
                watch.cancel()
            if probe.announced is not None:
                self._announce(EngineRemoved(base_url, drain_seconds))

    def _begin(self, probe: EngineProbe, group: asyncio.TaskGroup) -> None:
        self._watches[probe.base_url] = group.create_task(self._watch(probe), name=f"probe {probe.base_url}")

    async def close(self) -> None:
        """Close the connections to the engines."""
        await self._client.aclose()

    def reconnect(self) -> None:
        """Open new connections from now on, as what is trusted has changed."""
        before, self._client = self._client, self._make_client()
        if self._group is not None:
            self._group.create_task(before.aclose(), name="connections of before")

    def _make_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            timeout=self._timeout_seconds,
            trust_env=False,
            follow_redirects=False,
            verify=True if self._trust.tls is None else self._trust.tls,
        )

    def models(self) -> list[dict[str, Any]]:
        """The models of all engines that are up; the first engine's entry for each id."""
        entries: dict[str, dict[str, Any]] = {}
        for probe in self.probes:
            for model in probe.models if probe.up else ():
                entries.setdefault(str(model["id"]), model)
        return list(entries.values())

    def identify(self, engines: Iterable[EngineBelief]) -> list[tuple[str, EngineBelief]]:
        """Return those of ``engines`` of which it is known what they are, each with its fingerprint."""
        found = {probe.base_url: probe.fingerprint for probe in self.probes if probe.fingerprint}
        return [(found[engine.id], engine) for engine in engines if engine.id in found]

    async def _watch(self, probe: EngineProbe) -> None:
        while True:
            await self.look(probe)
            await asyncio.sleep(self._interval_seconds)

    async def look(self, probe: EngineProbe) -> None:
        """Probe one engine once and announce a change. Whatever an engine answers, this never raises."""
        try:
            await self._look(probe)
        except Exception:  # noqa: BLE001 - one engine must not end the watch over the others
            _log.exception("the probe of %s failed through a fault of the proxy", probe.base_url)

    async def look_first(self) -> None:
        """Probe all engines once at the start; one that is not there then is down, without a second look."""
        await asyncio.gather(*(self.look(probe) for probe in self.probes))
        for probe in self.probes:
            if probe.announced is None:
                self._set_down(probe, "not ready")

    async def _look(self, probe: EngineProbe) -> None:
        try:
            await self._get(probe, "/health")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            refused = isinstance(error, httpx.ConnectError)
            probe.failures = _FAILURES_UNTIL_DOWN if refused else probe.failures + 1
            if probe.failures >= _FAILURES_UNTIL_DOWN and (probe.up or probe.announced is None):
                self._set_down(probe, f"{type(error).__name__} {error}".strip())
            return
        probe.failures = 0
        models = await self._get_models(probe)
        models = probe.models if models is None else models
        metrics = await self._get_metrics(probe)
        probe.cache = read_cache_config(metrics) or probe.cache
        probe.plugin = read_plugin(metrics) if metrics else probe.plugin
        models_served = frozenset(str(model["id"]) for model in models)
        up = EngineUp(probe.base_url, self.limits(probe.cache), models_served, plugin=probe.plugin)
        if not probe.up or up != probe.announced:
            if not probe.up:
                _log.info(
                    "engine %s is up: models %s, KV cache %s, steps composed by %s",
                    up.engine_id,
                    sorted(up.models),
                    "of unknown size" if probe.cache.kv_tokens is None else f"{probe.cache.kv_tokens} tokens",
                    "vLLM" if probe.plugin is None else f"our plugin ({probe.plugin})",
                )
                if self._tiles and not up.limits.caches_prefixes:
                    _log.warning(
                        "engine %s does not cache prefixes: its prompts go whole, --tiles has no effect there",
                        up.engine_id,
                    )
            told = up if self._knowledge is None else await self._recall(probe, up, models, self._knowledge)
            # All at once: who finds a model in the list can have it.
            probe.up, probe.announced, probe.models = True, up, models
            self._announce(told)
        probe.models = models
        report = read_report(metrics)
        if report is not None or probe.reports:
            probe.reports = report is not None
            self._announce(EngineReported(probe.base_url, report))

    async def _recall(
        self, probe: EngineProbe, up: EngineUp, listed: list[dict[str, Any]], known: Knowledge
    ) -> EngineUp:
        """Find out what engine this is; if it is another than before, tell with it what is known about such engines."""
        if not probe.up:
            probe.version = await self._get_version(probe) or probe.version
        # Adapters come and go, and do not make another engine.
        models = (str(model["id"]) for model in listed if model.get("parent") is None)
        key = fingerprint(models, up.limits, probe.version)
        if key == probe.fingerprint:
            return up
        probe.fingerprint = key
        learnt, delay = known.recall(key), known.recall_delay(key)
        if learnt is not None:
            _log.info("engine %s: step model restored", probe.base_url)
        return replace(up, learnt=learnt, delay=delay)

    def _set_down(self, probe: EngineProbe, why: str) -> None:
        _log.warning("engine %s is down: %s", probe.base_url, why)
        probe.up = probe.reports = False
        probe.announced = EngineDown(probe.base_url)
        self._announce(probe.announced)

    async def _get(self, probe: EngineProbe, path: str) -> bytes:
        """Return the body of a successful answer.

        Raises:
            httpx.HTTPError: there was none, or one that is too long.
            TimeoutError: it did not come in time.
        """
        body = bytearray()
        # httpx's own limits start anew with every byte.
        async with (
            asyncio.timeout(self._timeout_seconds),
            self._client.stream(
                "GET", probe.base_url + path, headers=self._trust.keys.headers(probe.base_url)
            ) as answer,
        ):
            answer.raise_for_status()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > _MAX_BYTES:
                    raise httpx.DecodingError("the answer is too long")
        return bytes(body)

    async def _get_models(self, probe: EngineProbe) -> list[dict[str, Any]] | None:
        try:
            entries = json.loads(await self._get(probe, "/v1/models"))["data"]
            return [entry for entry in entries if isinstance(entry.get("id"), str)][:_MAX_MODELS]
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # an engine without this endpoint is taken to serve any model

    async def _get_version(self, probe: EngineProbe) -> str | None:
        try:
            return str(json.loads(await self._get(probe, "/version"))["version"])
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
            return None

    async def _get_metrics(self, probe: EngineProbe) -> str:
        try:
            return (await self._get(probe, "/metrics")).decode(errors="replace")
        except (httpx.HTTPError, TimeoutError):
            return ""
