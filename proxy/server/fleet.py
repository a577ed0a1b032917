"""The live shell of a member of a fleet: its signs of life, its letters, and those that come.

What is decided, and by whom, is the member's affair (``core.fleet``); what is kept is the store's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from proxy.configfile import ConfigError
from proxy.core.events import HandedOver
from proxy.core.fleet import Member, Role
from proxy.server.driver import Driver
from proxy.store.contract import StoreError
from proxy.telemetry.metrics import FleetCounts
from proxy.wire.letters import LetterError, decode_letter, encode_letter

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from proxy.config import Settings
    from proxy.core.actions import Action
    from proxy.core.claims import Claim
    from proxy.core.fleet import Letter
    from proxy.core.scheduler import Scheduler
    from proxy.store.contract import StateStore
    from proxy.store.redis import RedisStore
    from proxy.telemetry.chronicle import Observe
    from proxy.telemetry.metrics import Metrics

_TELL_SECONDS = 60.0
"""Between two warnings of letters that cannot be read: as many may come as somebody likes."""

_log = logging.getLogger(__name__)


class FleetDriver(Driver):
    """Drives a member: as a scheduler, and tells when it has letters to send."""

    def __init__(self, member: Member, loop: asyncio.AbstractEventLoop, **how: Any) -> None:
        super().__init__(member.scheduler, loop, decider=member, **how)
        self.member = member
        self.mail = asyncio.Event()
        """Set when the member has something to send."""
        self.on_answered: Callable[[Claim], None] = lambda _: None
        """Told of each claim that has been judged elsewhere, or later than it was made."""

    @property
    def decides(self) -> bool:
        return self.member.decides(self.now())

    def on_tokens(self, request_id: str, chunks: int, now: float) -> None:
        super().on_tokens(request_id, chunks, now)
        self.post()

    def obey(self, actions: list[Action], now: float) -> None:
        """Do what another replica has decided, or what comes of another one deciding from now on."""
        if actions and self._on_decision is not None:
            self._on_decision(HandedOver, actions, None)
        if actions and self._observe is not None:
            self._observe(HandedOver(), actions, now)
        self.perform(actions, now)

    def perform(self, actions: list[Action], now: float) -> None:
        super().perform(actions, now)
        if answered := self.member.claims.answered:
            self.member.claims.answered = []
            for claim in answered:
                self.on_answered(claim)
        self.post()

    def post(self) -> None:
        """Send what the member has to tell, if there is something."""
        if self.member.has_mail:
            self.mail.set()


class Fleet:
    """Keeps one member in touch with the others."""

    def __init__(self, store: StateStore, driver: FleetDriver) -> None:
        self.store = store
        self.counts = FleetCounts()
        self._driver = driver
        self._member = driver.member
        self._answers = True  # whether the store has answered to the last sign of life
        self._hurry = asyncio.Event()  # set when the next sign of life cannot wait
        self._secret = secrets.token_bytes(32)
        self._epoch = 0  # in which the store was last seen to have the secret
        self._told = (Role.FOLLOWER, "")  # what the log has last said of who decides
        self._tells_at = -inf  # when to warn again of a letter that cannot be read

    @property
    def member(self) -> Member:
        return self._member

    async def secret(self) -> bytes:
        """The secret by which all replicas hide API keys and know a request that comes again.

        Its own where the store cannot be reached: then those who come again at another replica are not known.
        """
        try:
            self._secret = await self.store.share("secret", self._secret)
        except StoreError as error:
            _log.warning("the store of the fleet cannot be reached: %s", error)
        return self._secret

    async def join(self) -> None:
        """Give the first sign of life, so that it is known who leads before anybody is served."""
        await self._beat()

    async def run(self) -> None:
        """Keep in touch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.store.listen(self._member.id, self._receive), name="letters in")
            group.create_task(self._post(), name="letters out")
            group.create_task(self._live(), name="signs of life")

    async def leave(self) -> None:
        """Tell the others that this replica ends; when nobody can be told, they find out."""
        self._member.leave()
        with suppress(StoreError):
            await self._send(self._member.take_outbox(self._driver.now()))
            await self.store.resign(self._member.id)
        await self.store.close()

    async def _live(self) -> None:
        loop, every = asyncio.get_running_loop(), self._member.config.beat_seconds
        due = loop.time() + every
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._hurry.wait()
            self._hurry.clear()
            now = loop.time()
            due = min(due, now) + every
            await self._beat()
            due = max(due, loop.time())

    async def _beat(self) -> None:
        member, driver = self._member, self._driver
        sent_at = driver.now()
        leader = member.leader
        try:
            if member.resigns:
                await self.store.resign(member.id)
            standing = await self.store.beat(member.id, member.config.life_seconds, willing=member.willing)
        except StoreError as error:
            self.counts.failed_beats += 1
            if self._answers:  # once, however long it lasts
                _log.warning("fleet: no answer to a sign of life: %s", error)
            self._answers, standing = False, None
        now = driver.now()
        if standing is not None:
            if not self._answers:
                _log.warning("fleet: the store answers again")
            self._answers = True
            self.counts.beats += 1
            self.counts.beat_seconds += now - sent_at
        driver.obey(member.on_standing(standing, sent_at, now), now)
        if standing is not None and standing.epoch != self._epoch:
            await self._share_again(standing.epoch)
        if member.leader != leader:
            self.counts.leaders += 1
        if (found := (member.role, member.leader)) != self._told:  # by letters and time, too
            self._told = found
            _log.info("fleet: %s, %s leads", member.role, member.leader or "nobody")

    async def _share_again(self, epoch: int) -> None:
        """Give the store the secret, for those who come later: it may have lost all that it had."""
        with suppress(StoreError):
            if await self.store.share("secret", self._secret) != self._secret:
                _log.warning(
                    "fleet: the others have got another secret; until this replica starts anew, who is told apart by an"
                    " API key has a share of its own here"
                )
            self._epoch = epoch

    async def _post(self) -> None:
        driver, sends = self._driver, True
        while True:
            await driver.mail.wait()
            driver.mail.clear()
            try:
                # One after the other, as they must come in this order; what happens meanwhile goes with the next.
                await self._send(self._member.take_outbox(driver.now()))
                sends = True
                if self._member.resigns:  # and everybody has been told
                    self._hurry.set()
            except StoreError as error:  # the number of the letter will be missed
                self.counts.letters_failed += 1
                _log.log(logging.WARNING if sends else logging.DEBUG, "fleet: letters are not sent: %s", error)
                sends = False

    async def _send(self, letters: list[Letter]) -> None:
        for letter in letters:
            data = encode_letter(letter)
            if not letter.leads:
                await self.store.post(letter.to, data)
            elif not await self.store.post_as_leader(letter.to, data, letter.sender, letter.epoch):
                self.counts.letters_fenced += 1
                continue
            self.counts.letters_sent += 1

    def _receive(self, data: bytes) -> None:
        if not data:  # the lead is free: the next one should not take long
            self._hurry.set()
            return
        now = self._driver.now()
        try:
            letter = decode_letter(data)
        except LetterError as error:
            self._unread(f"{error}", now)
            return
        try:
            actions = self._member.receive(letter, now)
        except Exception:  # noqa: BLE001 - whatever it says, this replica has requests of its own
            self._unread("a fault of the proxy, or a forged letter", now, exc_info=True)
            return
        self.counts.letters_received += 1
        self._driver.obey(actions, now)

    def _unread(self, why: str, now: float, *, exc_info: bool = False) -> None:
        self.counts.letters_unread += 1
        if now >= self._tells_at:
            self._tells_at = now + _TELL_SECONDS
            _log.warning("fleet: a letter is left aside: %s", why, exc_info=exc_info)


def drive(
    settings: Settings, store_url: str | None, scheduler: Scheduler, metrics: Metrics, observe: Observe | None
) -> tuple[Driver, Fleet | None]:
    """Drive a scheduler: alone, or as a member of the fleet that meets at a store.

    Raises:
        ConfigError: it names one that cannot be joined.
    """
    loop = asyncio.get_running_loop()
    if store_url is None:
        return Driver(scheduler, loop, observe=observe, on_decision=metrics.record_decision), None
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"  # never the same again
    member = Member(name, scheduler)
    driver = FleetDriver(member, loop, observe=observe, on_decision=metrics.record_decision)
    fleet = Fleet(open_store(store_url, settings.redis_pool), driver)
    metrics.watch_fleet(member, fleet.counts)
    return driver, fleet


def open_store(url: str, pool: str) -> RedisStore:
    """Open the store at ``url`` without connecting yet.

    Raises:
        ConfigError: that cannot be done.
    """
    try:
        from proxy.store.redis import RedisStore  # noqa: PLC0415 - of the extra redis
    except ImportError:
        raise ConfigError("--redis needs the package redis: pip install 'slai-proxy[redis]'") from None
    try:
        return RedisStore.from_url(url, pool)
    except (TypeError, ValueError) as error:  # what stands behind the ? of a URL goes to redis-py
        raise ConfigError(f"redis: {error}") from None
