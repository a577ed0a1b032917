"""Who may use the proxy: API keys, what each may do, and how much of it.

``admit`` guards every path but the probes of ``OPEN_PATHS``, before a byte of a body is read; targets that go to no
engine are refused to everybody. A request that is let in carries its ``Caller``, which knows the limits that need the
body: the model, and the tokens that the request may use.
What is used of a key's limits is counted by ``core.claims``: here, or at the replica that leads a fleet.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from proxy.core.claims import Claim, Claims
from proxy.core.quota import QuotaReason, QuotaRefusal
from proxy.server.answers import carried, error_response
from proxy.wire.apis import APIS
from proxy.wire.errors import AccessFailure, ErrorAnswer, LocalFailure, answer
from proxy.wire.keys import Key, KeyRing, is_engine_administration, presented_key
from proxy.wire.ratelimit import rate_limit_headers
from proxy.wire.targets import is_forwardable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proxy.core.request import RejectReason
    from proxy.server.driver import Ticket
    from proxy.server.fleet import FleetDriver
    from proxy.telemetry.metrics import Metrics

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
_PROBING = (hdrs.METH_GET, hdrs.METH_HEAD)
"""By other methods these are paths of an engine's."""

_QUOTA_FAILURES = {
    QuotaReason.REQUESTS: AccessFailure.REQUESTS_PER_MINUTE,
    QuotaReason.TOKENS: AccessFailure.TOKENS_PER_MINUTE,
    QuotaReason.CONCURRENCY: AccessFailure.CONCURRENCY,
}
_BODYLESS = ("GET", "HEAD", "OPTIONS")


class AccessError(Exception):
    """A request is not let in; ``told`` is what its client gets."""

    def __init__(self, failure: AccessFailure | RejectReason | LocalFailure, told: ErrorAnswer) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.told = told


@dataclass(slots=True, eq=False)
class Caller:
    """The key of one request, and what the request holds of its limits."""

    key: Key
    claim: Claim
    access: Access

    def use_model(self, model: str, method: str = "POST") -> None:
        """Let the request have a model.

        Raises:
            AccessError: the key may not use it, or it is not known which one is asked for.
        """
        if method in _BODYLESS or self.key.may_use(model):
            return
        name = f"{model[:100]!r}" if model else "a model that the request does not name"
        raise _refused(AccessFailure.MODEL, f"this API key may not use {name}")

    def use_class(self, name: str | None) -> str | None:
        """Return the class of a request that asks for ``name``: the key's own where it asks for none.

        Raises:
            AccessError: the key may not use it.
        """
        allowed = self.key.classes
        if name is None:
            return allowed[0] if allowed else None
        if allowed and name not in allowed:
            raise _refused(AccessFailure.CLASS, f"this API key may only use the classes {', '.join(allowed)}")
        return name

    def reserve(self, prompt_tokens: int, max_tokens: int | None) -> None:
        """Hold the tokens that the request may use; if another replica decides on that, ``judged`` tells.

        Raises:
            AccessError: the key has not so many left.
        """
        access = self.access
        access.claims.reserve(self.claim, prompt_tokens, max_tokens, access.now())
        access.post()
        self.check()

    async def judged(self) -> None:
        """Wait until all that was claimed is granted.

        Raises:
            AccessError: it is not.
        """
        if self.claim.pending:
            answered = asyncio.Event()
            self.access.on_answer(self.claim, answered.set)
            await answered.wait()
        self.check()

    def hang(self, request_id: str) -> None:
        """Have a request that is about to be scheduled go on only if what was claimed is granted."""
        if self.claim.pending:
            self.access.hang(request_id, self.claim)

    def refuse_by(self, ticket: Ticket, granted: Callable[[], object]) -> None:
        """Have a ticket raise ``AccessError`` if what was claimed is not granted; call ``granted`` when it is."""

        def on_answer() -> None:
            if ticket.done():
                return
            if self.claim.refusal is None:
                granted()
                return
            refusal = _over_limit(self.claim.refusal)
            if not self.claim.begun:
                self.access.count(refusal)
            ticket.set_exception(refusal)
            ticket.exception()  # whoever waited may be gone

        if self.claim.pending:
            self.access.on_answer(self.claim, on_answer)
        else:
            granted()

    def check(self) -> None:
        """Look at what was claimed, as far as it is known.

        Raises:
            AccessError: it was refused.
        """
        if self.claim.refusal is not None:
            raise _over_limit(self.claim.refusal)

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """End the request with what it did use. Only the first end counts."""
        access = self.access
        access.forget(self.claim)
        access.claims.end(self.claim, access.now(), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        access.post()

    def headers(self) -> dict[str, str]:
        """What its client is told of the limits."""
        return rate_limit_headers(*self.access.claims.quotas.left(self.claim, self.access.now()))


CALLER = web.RequestKey("caller", Caller)


@dataclass(slots=True)
class Access:
    """The keys in force, and the claims on their limits; without keys everybody is let in."""

    now: Callable[[], float]
    refused: Callable[[AccessFailure], None] = lambda _: None
    """Told of every refusal."""
    ring: KeyRing | None = None
    claims: Claims = field(default_factory=Claims)
    post: Callable[[], None] = lambda: None
    """Sends what a claim has to tell another replica."""
    hang: Callable[[str, Claim], None] = lambda *_: None
    """Has a request, by its id, wait for what becomes of a claim, too."""
    _waiting: dict[int, Callable[[], object]] = field(default_factory=dict)

    def tell(self, metrics: Metrics) -> None:
        """Count every refusal there."""
        self.refused = metrics.record_access_refusal

    def join(self, driver: FleetDriver) -> None:
        """Let a fleet's member judge claims from now on. Nobody has been let in yet."""
        self.now, self.claims, self.post = driver.now, driver.member.claims, driver.post
        self.hang = driver.member.hang
        driver.on_answered = self._answered
        self.change(self.ring)

    def count(self, refusal: AccessError) -> None:
        """Count a refusal that has to do with keys; others are counted elsewhere."""
        if isinstance(refusal.failure, AccessFailure):
            self.refused(refusal.failure)

    def change(self, keys: Iterable[Key] | None) -> None:
        """Put keys in force, all others out of it; ``None``: everybody is let in. What was used counts on."""
        self.ring = None if keys is None else KeyRing(keys)
        self.claims.quotas.change({key.name: key.limits for key in self.ring or ()}, self.now())

    def admit(self, request: web.Request, ring: KeyRing) -> Caller:
        """Let a request in by its head; if another replica decides on that, ``Caller.judged`` tells.

        Raises:
            AccessError: no known key, a path that is not for it, or a limit of it is reached.
        """
        presented = presented_key(request.headers)
        if not presented:
            raise AccessError(AccessFailure.NO_KEY, answer(AccessFailure.NO_KEY))
        key = ring.find(presented)
        if key is None:
            raise AccessError(AccessFailure.UNKNOWN_KEY, answer(AccessFailure.UNKNOWN_KEY))
        if not key.admin and is_engine_administration(request.path):
            raise AccessError(AccessFailure.PATH, answer(AccessFailure.PATH))
        caller = Caller(key, self.claims.begin(key.name, key.limits, self.now()), self)
        self.post()
        return caller

    def on_answer(self, claim: Claim, call: Callable[[], object]) -> None:
        """Call when a pending claim has been judged, unless it is forgotten before."""
        self._waiting[claim.number] = call

    def forget(self, claim: Claim) -> None:
        """Nobody waits for an answer to a claim."""
        self._waiting.pop(claim.number, None)

    def _answered(self, claim: Claim) -> None:
        if (call := self._waiting.pop(claim.number, None)) is not None:
            call()


ACCESS = web.AppKey("access", Access)


def keep_access(app: web.Application, keys: Iterable[Key] | None) -> Access:
    """Let ``keys`` decide on the requests to an application whose middleware asks ``admit``."""
    app[ACCESS] = access = Access(monotonic)
    access.change(keys)
    return access


def admit(request: web.Request, access: Access) -> Caller | None:
    """Let in who may come in; what is held for it is to be settled when the request is over.

    Its claim may still have to be judged (``Caller.judged``), unless it ``goes_on_at_once``, and is to be checked.

    Raises:
        AccessError: it may not.
    """
    if not is_forwardable(request.method, request.rel_url.raw_path):
        raise AccessError(LocalFailure.TARGET, answer(LocalFailure.TARGET))
    ring = access.ring
    if ring is None or (request.path in OPEN_PATHS and request.method in _PROBING):
        return None
    request[CALLER] = caller = access.admit(request, ring)
    return caller


def goes_on_at_once(request: web.Request) -> bool:
    """Whether a request is scheduled as soon as it is let in: then both can be asked for in one letter."""
    return (
        request.path in APIS
        and request.method == hdrs.METH_POST
        and request.content.is_eof()
        and hdrs.CONTENT_ENCODING not in request.headers  # to undo that is work, for one that may be refused
    )


def refuse(request: web.Request, refusal: AccessError) -> web.Response:
    """The answer to a refused request."""
    response = error_response(refusal.told, request.path)
    if refusal.told.status == web.HTTPUnauthorized.status_code:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Add the caller's limits to an answer, whoever made it."""
    caller = carried(request, CALLER)
    if caller is not None:
        response.headers.update(caller.headers())


def _refused(failure: AccessFailure, message: str) -> AccessError:
    return AccessError(failure, answer(failure, message=message))


def _over_limit(refusal: QuotaRefusal) -> AccessError:
    failure = _QUOTA_FAILURES[refusal.reason]
    wait = refusal.retry_after_seconds
    found = answer(failure)
    if wait is None:
        return AccessError(
            failure,
            answer(failure, message=f"the prompt alone is longer than the limit of {refusal.limit} tokens per minute"),
        )
    return AccessError(failure, answer(failure, message=f"{found.message}: {refusal.limit}", retry_after_seconds=wait))
