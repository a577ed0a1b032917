"""Who may use the proxy: API keys, what each may do, and how much of it.

``admit`` guards every path but the probes of ``OPEN_PATHS``, before a byte of a body is read; targets that go to no
engine are refused to everybody. A request that is let in
carries its ``Caller``, which knows the limits that need the body: the model, and the tokens that the request may use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.core.quota import Quota, QuotaLease, QuotaReason, QuotaRefusal
from proxy.server.answers import error_response
from proxy.wire.errors import AccessFailure, ErrorAnswer, LocalFailure, answer
from proxy.wire.keys import Key, KeyRing, is_engine_administration, presented_key
from proxy.wire.ratelimit import rate_limit_headers
from proxy.wire.targets import is_forwardable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from proxy.core.request import RejectReason
    from proxy.telemetry.metrics import Metrics

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})

_QUOTA_FAILURES = {
    QuotaReason.REQUESTS: AccessFailure.REQUESTS_PER_MINUTE,
    QuotaReason.TOKENS: AccessFailure.TOKENS_PER_MINUTE,
    QuotaReason.CONCURRENCY: AccessFailure.CONCURRENCY,
}
_BODYLESS = ("GET", "HEAD", "OPTIONS")


class AccessError(Exception):
    """A request is not let in; ``told`` is what its client gets."""

    def __init__(self, failure: AccessFailure | RejectReason, told: ErrorAnswer) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.told = told
        self.limits: dict[str, str] = {}
        """Headers on the limits of a key that was let in no further than this."""


@dataclass(slots=True, eq=False)
class Caller:
    """The key of one request, and what the request holds of its limits."""

    key: Key
    quota: Quota
    lease: QuotaLease
    now: Callable[[], float]

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
        """Hold the tokens that the request may use.

        Raises:
            AccessError: the key has not so many left.
        """
        refusal = self.quota.reserve(self.lease, prompt_tokens, max_tokens, self.now())
        if refusal is not None:
            raise _over_limit(refusal)

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """End the request with what it did use. Only the first end counts."""
        self.quota.end(self.lease, self.now(), prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def headers(self) -> dict[str, str]:
        """What its client is told of the limits."""
        now = self.now()
        return rate_limit_headers(self.quota.requests(now), self.quota.tokens(now))


CALLER = web.RequestKey("caller", Caller)


@dataclass(slots=True)
class Access:
    """The keys in force, and what is used of their limits; without keys everybody is let in."""

    now: Callable[[], float]
    refused: Callable[[AccessFailure], None] = lambda _: None
    """Told of every refusal."""
    ring: KeyRing | None = None
    _quotas: dict[str, Quota] = field(default_factory=dict)

    def tell(self, metrics: Metrics) -> None:
        """Count every refusal there."""
        self.refused = metrics.record_access_refusal

    def count(self, refusal: AccessError) -> None:
        """Count a refusal that has to do with keys; others are counted elsewhere."""
        if isinstance(refusal.failure, AccessFailure):
            self.refused(refusal.failure)

    def change(self, keys: Iterable[Key] | None) -> None:
        """Put keys in force, all others out of it; ``None``: everybody is let in. What was used counts on."""
        if keys is None:
            self.ring, self._quotas = None, {}
            return
        now, ring, quotas = self.now(), KeyRing(keys), self._quotas
        self._quotas = {key.sha256: quotas.get(key.sha256) or Quota(key.limits, now) for key in ring}
        for key in ring:
            self._quotas[key.sha256].change(key.limits, now)
        self.ring = ring

    def admit(self, request: web.Request, ring: KeyRing) -> Caller:
        """Let a request in by its head.

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
        quota = self._quotas[key.sha256]
        now = self.now()
        lease = quota.begin(now)
        if isinstance(lease, QuotaRefusal):
            error = _over_limit(lease)
            error.limits = rate_limit_headers(quota.requests(now), quota.tokens(now))
            raise error
        return Caller(key, quota, lease, self.now)


_ACCESS = web.AppKey("access", Access)


def guard(app: web.Application, keys: Iterable[Key] | None) -> Access:
    """Let ``keys`` decide on the requests to an application whose middlewares include ``admit``."""
    app[_ACCESS] = access = Access(monotonic)
    access.change(keys)
    app.on_response_prepare.append(_tell_limits)
    return access


@web.middleware
async def admit(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Let in who may come in, and settle what was held when the request is over."""
    if not is_forwardable(request.method, request.rel_url.raw_path):
        return error_response(answer(LocalFailure.TARGET), request.path)
    access = request.app[_ACCESS]
    ring = access.ring
    if ring is None or request.path in OPEN_PATHS:
        try:
            return await handler(request)
        except AccessError as refusal:
            return refuse(request, refusal)
    try:
        caller = access.admit(request, ring)
        request[CALLER] = caller
    except AccessError as refusal:
        access.count(refusal)
        return refuse(request, refusal)
    try:
        return await handler(request)
    except AccessError as refusal:
        access.count(refusal)
        return refuse(request, refusal)
    finally:
        caller.settle(0, 0)


def refuse(request: web.Request, refusal: AccessError) -> web.Response:
    """The answer to a refused request."""
    response = error_response(refusal.told, request.path)
    response.headers.update(refusal.limits)
    if refusal.told.status == web.HTTPUnauthorized.status_code:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Add the caller's limits to an answer, whoever made it."""
    caller = request.get(CALLER)
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
