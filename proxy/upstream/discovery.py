"""Finding engines: a list, names in DNS, a file, the endpoints of a Kubernetes service; together they are the set.

A source tells the whole set whenever it has looked. What it tells is believed with care, as the engines themselves are
most likely still there when whoever lists them is not:

- one that fails keeps the set that it told last, and is asked again, ever more seldom;
- that there are none at all is believed only when it has been told for some time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

_log = logging.getLogger(__name__)

EMPTY_SECONDS = 30.0
"""For so long a source has to tell that there is no engine, until it is believed."""
MOST_ENGINES = 1000
"""Of one source: each is probed, and has metrics of its own."""
_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
_FIRST_ANSWER_SECONDS = 5.0

Urls = frozenset[str]


class SourceError(Exception):
    """A source cannot tell at present which engines there are; the message says why."""


class Source(Protocol):
    """Where engines are found; made from one entry of ``--engines``, by which it goes."""

    def watch(self) -> AsyncGenerator[Urls]:
        """Give the base URLs of all engines whenever they have been looked up, changed or not; without end.

        Raises:
            SourceError: they cannot be looked up at present; ``watch`` is called again after a while.
        """
        ...


def check_base_url(url: str) -> str:
    """Return an engine's base URL without a slash at its end.

    Raises:
        ValueError: it is none; the message says why.
    """
    url = url.strip().rstrip("/")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("an engine's URL must not hold credentials: they would show in logs and metrics")
    if not url.isprintable() or " " in url:
        raise ValueError(f"{url!r}: a URL has no spaces and no control characters")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"{url!r}: the port is not a number up to 65535") from None
    if parts.path.endswith("/v1"):
        raise ValueError(f"{url!r}: give the engine's base URL, without /v1")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a base URL like http://127.0.0.1:8001")
    return url


class Discovery:
    """Follows all sources and tells which engines are added and removed."""

    def __init__(self, add: Callable[[str], None], remove: Callable[[str], None]) -> None:
        self._add = add
        self._remove = remove
        self._fixed: tuple[str, ...] = ()
        self._told: dict[str, Urls] = {}  # by source
        self._engines: Urls = frozenset()
        self._sources: dict[str, Source] = {}
        self._empty: dict[str, asyncio.TimerHandle] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self.failing: dict[str, str] = {}
        """Sources that cannot tell at present, and why."""

    @property
    def engines(self) -> Urls:
        """The base URLs of all engines."""
        return self._engines

    def sources(self) -> Iterator[tuple[str, bool, int]]:
        """Give every source with whether it tells at present, and how many engines are known by it."""
        return ((name, name not in self.failing, len(self._told.get(name, ()))) for name in self._sources)

    def configure(self, fixed: Iterable[str], sources: dict[str, Source]) -> None:
        """Take these engines and sources in place of those before; sources of the same name go on as they are."""
        self._fixed = tuple(fixed)
        for name in self._sources.keys() - sources.keys():
            del self._sources[name]
            self._told.pop(name, None)
            self.failing.pop(name, None)
            self._doubt_no_more(name)
            if (following := self._following.pop(name, None)) is not None:
                following.cancel()
        for name in [n for n in sources if n not in self._sources]:
            self._sources[name] = sources[name]
            if self._group is not None:
                self._begin(name, self._group)
        self._settle()

    async def look_first(self, seconds: float = _FIRST_ANSWER_SECONDS) -> None:
        """Wait for the first answer of every source, but no longer than ``seconds``."""

        async def first(name: str, source: Source) -> None:
            try:
                async with asyncio.timeout(seconds), aclosing(source.watch()) as answers:
                    self._take(name, await anext(answers))
            except (SourceError, TimeoutError) as error:
                self._fail(name, str(error) or f"no answer within {seconds:g} s")

        await asyncio.gather(*(first(name, source) for name, source in self._sources.items()))

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._sources:
                self._begin(name, group)
            try:
                await asyncio.Event().wait()  # more may come
            finally:
                self._group = None
                for name in list(self._empty):
                    self._doubt_no_more(name)

    def _begin(self, name: str, group: asyncio.TaskGroup) -> None:
        self._following[name] = group.create_task(self._follow(name, self._sources[name]), name=f"engines of {name}")

    async def _follow(self, name: str, source: Source) -> None:
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            why = "it has ended"
            try:
                async with aclosing(source.watch()) as answers:
                    async for urls in answers:
                        self._take(name, urls)
                        retry_seconds = _FIRST_RETRY_SECONDS
            except SourceError as error:
                why = str(error)
            except Exception:  # noqa: BLE001 - one source must not end the others
                _log.exception("engines of %s: a fault of the proxy", name)
                why = "a fault of the proxy"
            self._fail(name, why)
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, _LONGEST_RETRY_SECONDS)

    def _fail(self, name: str, why: str) -> None:
        if name not in self.failing:
            kept = len(self._told.get(name, ()))
            _log.warning("engines of %s: %s; the %d known ones are kept", name, why, kept)
        self.failing[name] = why
        self._doubt_no_more(name)

    def _take(self, name: str, urls: Urls) -> None:
        if self.failing.pop(name, None) is not None:
            _log.info("engines of %s: it answers again", name)
        if len(urls) > MOST_ENGINES:
            _log.warning("engines of %s: %d of them, of which %d are taken", name, len(urls), MOST_ENGINES)
            urls = frozenset(sorted(urls)[:MOST_ENGINES])
        if urls or not self._told.get(name):
            self._doubt_no_more(name)
            self._told[name] = urls
            self._settle()
        elif name not in self._empty:
            _log.warning("engines of %s: it tells of none; believed if it still does in %g s", name, EMPTY_SECONDS)
            loop = asyncio.get_running_loop()
            self._empty[name] = loop.call_later(EMPTY_SECONDS, self._believe_empty, name)

    def _believe_empty(self, name: str) -> None:
        del self._empty[name]
        self._told[name] = frozenset()
        self._settle()

    def _doubt_no_more(self, name: str) -> None:
        if (timer := self._empty.pop(name, None)) is not None:
            timer.cancel()

    def _settle(self) -> None:
        engines = frozenset(self._fixed).union(*self._told.values())
        before, self._engines = self._engines, engines
        for url in dict.fromkeys((*self._fixed, *sorted(engines))):
            if url not in before:
                self._add(url)
        for url in sorted(before - engines):
            _log.info("engine %s is removed: nobody tells of it any more", url)
            self._remove(url)
