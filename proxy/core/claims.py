"""What requests claim of their API keys' quotas, and what each was granted.

A request claims to be let in by its head, and once its body is read the tokens that it may use. Whoever decides on it
has the quotas: this replica, or the one that leads its fleet (``core.fleet.claiming``); then a claim is pending until
the answer comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from proxy.core.quota import Quota, QuotaLease, QuotaLimits, QuotaRefusal, Remaining, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

Left = tuple[Remaining | None, Remaining | None]
"""What is left of a key's requests and tokens; ``None``: there is no limit."""


@dataclass(slots=True, eq=False)
class Claim:
    """What one request claims, and what it has been told."""

    number: int
    """Its replica's own."""
    key: str
    """Name of the API key."""
    limits: QuotaLimits
    """Those of the key where the request came."""
    begun: bool = False
    """Whether it was let in."""
    asks: tuple[int, int | None] | None = None
    """Tokens of its prompt, and the most that it may generate."""
    granted_tokens: int | None = None
    """What it may use, if that was granted."""
    refusal: QuotaRefusal | None = None
    left: Left = (None, None)
    """As it was last told by another replica."""
    used: tuple[int, int] | None = None
    """Tokens of prompt and answer; there when the request is over."""
    request_id: str = ""
    """Of the request that goes on as if it were granted, until it is."""
    quota: Quota | None = None
    lease: QuotaLease | None = None
    """There where it is held by a quota here."""
    sent_in: int = 0
    """Number of the letter that tells of its end; 0: none yet."""

    @property
    def pending(self) -> bool:
        """Whether an answer is due."""
        if self.refusal is not None or self.used is not None:
            return False
        return not self.begun or (self.asks is not None and self.granted_tokens is None)


class Quotas:
    """The quotas of all keys, by the keys' names."""

    def __init__(self) -> None:
        self._quotas: dict[str, Quota] = {}
        self._named: set[str] = set()  # by our own settings
        self._parts = 1
        self._changed: set[str] = set()  # since others were last told

    def __getitem__(self, key: str) -> Quota:
        return self._quotas[key]

    def change(self, limits: Mapping[str, QuotaLimits], now: float) -> None:
        """Put limits in force, those of all other keys out of it; what was used counts on."""
        for gone in self._named - limits.keys():
            del self._quotas[gone]
        self._named = set(limits)
        for key, of_key in limits.items():
            self._of(key, of_key, now).change(of_key, now)

    def judge(self, claim: Claim, now: float) -> None:
        """Grant or refuse what a claim asks for and has not been told."""
        if not claim.pending:
            return
        self._changed.add(claim.key)
        quota = claim.quota or self._of(claim.key, claim.limits, now)
        if not claim.begun:
            told = quota.begin(now)
            if isinstance(told, QuotaRefusal):
                claim.refusal, claim.left = told, (quota.requests(now), quota.tokens(now))
                return
            claim.quota, claim.lease, claim.begun = quota, told, True
        if claim.asks is not None and claim.lease is not None and claim.granted_tokens is None:
            claim.refusal = quota.reserve(claim.lease, *claim.asks, now)
            claim.granted_tokens = None if claim.refusal is not None else claim.lease.reserved_tokens
        claim.left = quota.requests(now), quota.tokens(now)

    def hold(self, claim: Claim, now: float) -> None:
        """Count what a claim was granted elsewhere."""
        if claim.begun and claim.lease is None:
            claim.quota = self._of(claim.key, claim.limits, now)
            claim.lease = claim.quota.hold(claim.granted_tokens or 0)

    def end(self, claim: Claim, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """Take what a request did use, and hold nothing for it any more."""
        if claim.quota is not None and claim.lease is not None:
            self._changed.add(claim.key)
            claim.quota.end(claim.lease, now, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def left(self, claim: Claim, now: float) -> Left:
        """What is left of the quota of a claim; what it was last told, if it has none here."""
        return claim.left if claim.quota is None else (claim.quota.requests(now), claim.quota.tokens(now))

    # -- what others know, and are told --

    def divide(self, parts: int, now: float) -> None:
        """Have one of so many parts of every quota."""
        self._parts = parts
        for quota in self._quotas.values():
            quota.divide(parts, now)

    def unite(self, now: float) -> dict[str, Usage]:
        """Have whole quotas again, as they were known, and return what was used of the parts since."""
        self._parts = 1
        used = {key: quota.unite(now) for key, quota in self._quotas.items()}
        return {key: usage for key, usage in used.items() if usage}

    def let_go(self) -> None:
        """Hold nothing for anybody: another replica does."""
        for quota in self._quotas.values():
            quota.let_go()

    def add(self, key: str, usage: Usage, now: float) -> None:
        """Take what was used elsewhere; of a key that is not known here, nobody would be refused for it."""
        if (quota := self._quotas.get(key)) is not None:
            self._changed.add(key)
            quota.set_used(quota.used(now) + usage, now)

    def learn(self, key: str, usage: Usage, usual_output: float, now: float, *, at_least: bool = False) -> None:
        """Know what is used, as another replica counts it, or ``at_least`` has counted it."""
        if (quota := self._quotas.get(key)) is not None:
            known = quota.used(now) if at_least else Usage()
            quota.set_used(Usage(max(known.requests, usage.requests), max(known.tokens, usage.tokens)), now)
            quota.usual_output = usual_output

    def known(self, now: float, *, all_keys: bool = False) -> dict[str, tuple[Usage, float]]:
        """Return what ``learn`` takes: of all keys, or of those of which it has become another since the last time."""
        if all_keys:
            told = {key: (quota.used(now), quota.usual_output) for key, quota in self._quotas.items()}
            return {key: of_key for key, of_key in told.items() if of_key[0]}
        changed, self._changed = self._changed & self._quotas.keys(), set()
        return {key: (self._quotas[key].used(now), self._quotas[key].usual_output) for key in sorted(changed)}

    def _of(self, key: str, limits: QuotaLimits, now: float) -> Quota:
        """Return a key's quota. Of a key that is not in our own settings, the limits are what the claim says."""
        quota = self._quotas.get(key)
        if quota is None:
            quota = self._quotas[key] = Quota(limits, now)
            quota.divide(self._parts, now)
        elif key not in self._named:
            quota.change(limits, now)
        return quota


class Claims:
    """The claims of a replica that decides on them itself."""

    def __init__(self) -> None:
        self.quotas = Quotas()
        self._numbers = count(1)

    def begin(self, key: str, limits: QuotaLimits, now: float) -> Claim:
        """Claim that a request be let in."""
        claim = Claim(next(self._numbers), key, limits)
        self.quotas.judge(claim, now)
        return claim

    def reserve(self, claim: Claim, prompt_tokens: int, max_tokens: int | None, now: float) -> None:
        """Claim the tokens that a request may use, once."""
        claim.asks = prompt_tokens, max_tokens
        self.quotas.judge(claim, now)

    def end(self, claim: Claim, now: float, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tell that a request is over and what it has used. Only the first end counts."""
        if claim.used is None:
            claim.used = prompt_tokens, output_tokens
            self.quotas.end(claim, prompt_tokens, output_tokens, now)
