"""What one API key may use: requests and tokens per minute, and requests at once.

Each rate is a token bucket: full at first, it holds a minute's worth and fills at the rate, so that within any ``t``
seconds no more than ``limit * (1 + t / 60)`` is used. What a request will use is only known when it ends. Until then
what it may use is *reserved* beside the bucket, not taken out of it; at its end what it did use is taken, and the
reservation goes. So what an early end leaves is there again at once, and a bucket that has refilled meanwhile is not
filled twice. As long as no request uses more than it reserved, the bucket never falls below zero; where one does (its
prompt was longer than thought), the debt is paid back before anything else is let in.

Those who are refused are told to come back one after the other, each when the bucket will have gained enough for all
that were told before: were all told when there is enough for one, only one of them would get in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

_MINUTE = 60.0
_FIRST_OUTPUT = 256.0
"""Tokens that an answer without a limit is taken to have, until the key's own answers tell."""
_OUTPUT_WEIGHT = 0.1
_ROUNDING = 1e-9
_LONGEST_LINE = 120.0
"""Seconds. OpenAI's client libraries do not heed a longer wait."""
_GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly, however many there are."""


class QuotaReason(StrEnum):
    """Which limit a request would break."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Most requests and tokens (prompt and output) a minute, and most requests at once; ``None``: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if any(limit is not None and limit < 1 for limit in self._all()):
            raise ValueError("limits must be at least 1")

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self._all() != (None, None, None)

    def _all(self) -> tuple[int | None, ...]:
        return self.requests_per_minute, self.tokens_per_minute, self.concurrency


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """A request that may not go now. ``retry_after_seconds``: when it may; ``None``: never, it is too large."""

    reason: QuotaReason
    limit: int
    retry_after_seconds: float | None


@dataclass(slots=True, eq=False)
class QuotaLease:
    """What one request holds of a quota; give it back by ``Quota.end``, once."""

    reserved_tokens: int = 0
    open: bool = True


@dataclass(frozen=True, slots=True)
class Remaining:
    """One limit, as clients are told of it."""

    limit: int
    remaining: int
    reset_seconds: float
    """Until all of it is there again."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What is used of a quota, and has not come back since: what its buckets lack of being full."""

    requests: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.requests + other.requests, self.tokens + other.tokens)

    def less(self, other: Usage) -> Usage:
        """Return what it is beyond another."""
        beyond = self.requests - other.requests, self.tokens - other.tokens
        return Usage(*(amount if amount > _ROUNDING else 0.0 for amount in beyond))

    def part(self, parts: int) -> Usage:
        """Return one of so many equal parts."""
        return Usage(self.requests / parts, self.tokens / parts)

    def __bool__(self) -> bool:
        # Not by ==, which for two dataclasses is ``is`` where mypyc compiled it.
        return bool(self.requests or self.tokens)


_NOTHING = Usage()


class TokenBucket:
    """``limit`` a minute, and room for what comes in ``burst_seconds``. ``now`` never decreases from call to call."""

    __slots__ = ("_at", "_burst", "_level", "_line_ends", "_refusals", "limit")

    def __init__(self, limit: float, now: float, burst_seconds: float = _MINUTE) -> None:
        self.limit = limit
        self._burst = burst_seconds / _MINUTE
        self._level = self.capacity
        self._at = now
        self._line_ends = now  # when all that were told to come back will have done so
        self._refusals = 0

    @property
    def capacity(self) -> float:
        """The most that it holds."""
        return self.limit * self._burst

    def level(self, now: float) -> float:
        """What is in the bucket; below zero where requests used more than they had reserved."""
        return min(self.capacity, self._level + max(0.0, now - self._at) * self.limit / _MINUTE)

    def lacks_seconds(self, amount: float, now: float) -> float:
        """Return how long until ``amount`` is there; 0 if it is now."""
        return max(0.0, (amount - self.level(now)) * _MINUTE / self.limit)

    def turn_seconds(self, wait: float, amount: float, now: float) -> float:
        """Return when one comes back best that is refused ``amount`` now, of which there will be enough after ``wait``.

        That is after those who were refused before. Where these fill the longest line already, nothing can be promised,
        and they are spread over the second half of it.
        """
        line = self._line_ends - now
        turn = max(wait, line + amount * _MINUTE / self.limit) if line > 0 else wait
        if turn > max(wait, _LONGEST_LINE):
            self._refusals += 1
            return max(wait, _LONGEST_LINE / 2 * (1 + self._refusals * _GOLDEN % 1))
        self._line_ends = now + turn
        return turn

    def take(self, amount: float, now: float) -> None:
        """Use up ``amount``."""
        self._level, self._at = self.level(now) - amount, max(self._at, now)

    def correct(self, amount: float) -> None:
        """Note that by so much too little was taken before, or (negative) too much."""
        self._level -= amount

    def used(self, now: float) -> float:
        """Return what it lacks of being full."""
        return self.capacity - self.level(now)

    def set_used(self, amount: float, now: float) -> None:
        """Have it lack so much."""
        self._level, self._at = min(self.capacity, self.capacity - amount), max(self._at, now)

    def resize(self, limit: float, now: float, burst_seconds: float | None = None) -> None:
        """Change the limit, and the room if told so; what was used stays used."""
        used = self.used(now)
        self.limit = limit
        if burst_seconds is not None:
            self._burst = burst_seconds / _MINUTE
        self.set_used(used, now)

    def remaining(self, now: float, limit: int, reserved: int = 0) -> Remaining:
        """What is there now and not reserved. ``limit`` is what is told as such."""
        left = self.level(now) - reserved
        return Remaining(limit, max(0, int(left)), max(0.0, (self.capacity - left) * _MINUTE / self.limit))


@dataclass(slots=True)
class Quota:
    """The limits of one key and what is used of them, or one of several equal parts of both (``divide``)."""

    limits: QuotaLimits
    """Of the whole."""
    now: float
    active: int = 0
    """Requests under way."""
    reserved: int = 0
    """Tokens that they may still use."""
    parts: int = 1
    """Of how many this is one."""
    usual_output: float = _FIRST_OUTPUT
    """Tokens that its answers usually have."""
    _known: Usage = field(init=False, default=_NOTHING)
    """What was used of the whole when it was divided, at ``_divided_at``."""
    _divided_at: float = field(init=False, default=0.0)
    _requests: TokenBucket | None = field(init=False, default=None)
    _tokens: TokenBucket | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.change(self.limits, self.now)

    def change(self, limits: QuotaLimits, now: float) -> None:
        """Set other limits; what was used and is held counts on."""
        self.limits = limits
        self._requests = _resized(self._requests, limits.requests_per_minute, self.parts, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, self.parts, now)

    def divide(self, parts: int, now: float) -> None:
        """Be one of so many parts of the whole, of its limits and of what is used of them.

        A part has room for one request; and once it is full, for a prompt that is longer than it.
        """
        used = self._known = self.used(now)
        self.parts, self._divided_at = parts, now
        self.change(self.limits, now)
        self.set_used(used.part(parts), now)

    def unite(self, now: float) -> Usage:
        """Be the whole again, as it was known, and return what was used of the part since."""
        used, parts, minutes = self.used(now), self.parts, (now - self._divided_at) / _MINUTE
        limits = self.limits.requests_per_minute or 0, self.limits.tokens_per_minute or 0
        known = self._known.less(Usage(*(limit * minutes for limit in limits)))
        self.parts = 1
        self.change(self.limits, now)
        self.set_used(known, now)
        return used.less(known.part(parts))

    def used(self, now: float) -> Usage:
        """Return what is used; what is reserved is not."""
        requests, tokens = (0.0 if b is None else max(0.0, b.used(now)) for b in (self._requests, self._tokens))
        return Usage(requests, tokens)

    def set_used(self, usage: Usage, now: float) -> None:
        """Have so much used, whatever it was."""
        for bucket, amount in ((self._requests, usage.requests), (self._tokens, usage.tokens)):
            if bucket is not None:
                bucket.set_used(amount, now)

    def hold(self, tokens: int) -> QuotaLease:
        """Hold what a request was granted elsewhere: it counts there as a request that has come."""
        self.active += 1
        self.reserved += tokens
        return QuotaLease(tokens)

    def let_go(self) -> None:
        """Forget all that is held: it is another's to count."""
        self.active = self.reserved = 0

    def begin(self, now: float) -> QuotaLease | QuotaRefusal:
        """Let a request in, by its head alone. A refused one uses nothing."""
        most, limit = self.limits.concurrency, self.limits.requests_per_minute
        if most is not None and self.active >= max(1, most // self.parts):
            return QuotaRefusal(QuotaReason.CONCURRENCY, most, 1.0)
        bucket = self._requests
        if bucket is not None and limit is not None:
            if wait := bucket.lacks_seconds(1, now):
                return QuotaRefusal(QuotaReason.REQUESTS, limit, bucket.turn_seconds(wait, 1, now))
            bucket.take(1, now)
        self.active += 1
        return QuotaLease()

    def reserve(self, lease: QuotaLease, prompt_tokens: int, max_tokens: int | None, now: float) -> QuotaRefusal | None:
        """Hold the tokens that a request may use; what it held before is given up.

        ``max_tokens``: the most that it may generate; what its key's answers usually have where it does not say.
        A whole bucket will do for any output, or a client that allows more than it wants would never be served.
        """
        bucket, limit = self._tokens, self.limits.tokens_per_minute
        if bucket is None or limit is None or not lease.open:
            return None
        self.reserved -= lease.reserved_tokens
        lease.reserved_tokens = 0
        if prompt_tokens > limit:
            return QuotaRefusal(QuotaReason.TOKENS, limit, None)
        output = int(self.usual_output) if max_tokens is None else max_tokens
        wanted = min(prompt_tokens + output, int(bucket.capacity))
        if wait := bucket.lacks_seconds(wanted + self.reserved, now):
            return QuotaRefusal(QuotaReason.TOKENS, limit, bucket.turn_seconds(wait, wanted, now))
        self.reserved += wanted
        lease.reserved_tokens = wanted
        return None

    def end(self, lease: QuotaLease, now: float, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Settle a request that is over, with what it did use; a second end of the same does nothing."""
        if not lease.open:
            return
        lease.open = False
        self.active -= 1
        self.reserved -= lease.reserved_tokens
        if self._tokens is not None:
            self._tokens.take(prompt_tokens + output_tokens, now)
        if output_tokens:
            self.usual_output += _OUTPUT_WEIGHT * (output_tokens - self.usual_output)

    def requests(self, now: float) -> Remaining | None:
        """What is left of the requests; ``None`` without a limit."""
        bucket, limit = self._requests, self.limits.requests_per_minute
        return None if bucket is None or limit is None else bucket.remaining(now, limit)

    def tokens(self, now: float) -> Remaining | None:
        """What is left of the tokens; ``None`` without a limit."""
        bucket, limit = self._tokens, self.limits.tokens_per_minute
        return None if bucket is None or limit is None else bucket.remaining(now, limit, self.reserved)


def _resized(bucket: TokenBucket | None, limit: int | None, parts: int, now: float) -> TokenBucket | None:
    if limit is None:
        return None
    part = limit / parts
    burst_seconds = _MINUTE if part >= 1 else _MINUTE / part * (1 + _ROUNDING)  # for one at least
    if bucket is None:
        return TokenBucket(part, now, burst_seconds)
    if part != bucket.limit:
        bucket.resize(part, now, burst_seconds)
    return bucket
