"""What the leader does about the claims of another replica on the quotas of API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.claims import Claim
from proxy.core.fleet import letters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.claims import Quotas
    from proxy.core.quota import Remaining

ClaimNote = letters.Claims | letters.Reserves | letters.Settles
_LONGEST_SECONDS = 1e9
"""That a letter can tell."""


class Judging:
    """The claims of one replica, by their numbers there."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._held: dict[int, Claim] = {}
        self._due: list[Claim] = []

    def lets(self, number: int) -> bool:
        """Whether a request may go on that hangs on a claim; one that hangs on none (0) may."""
        claim = self._held.get(number)
        return not number or (claim is not None and claim.refusal is None)

    def take(self, note: ClaimNote, now: float) -> letters.Judged | None:
        """Take in what happened, and return the answer if there is one."""
        match note:
            case letters.Claims(number, key, limits):
                return self._judge(self._held.get(number) or Claim(number, key, limits), now)
            case letters.Reserves(number, prompt_tokens, max_tokens):
                if (claim := self._held.get(number)) is None:
                    return None  # it has been refused
                claim.asks = claim.asks or (prompt_tokens, max_tokens)
                return self._judge(claim, now)
            case letters.Settles(number, prompt_tokens, output_tokens):
                if (claim := self._held.pop(number, None)) is not None:
                    self._quotas.end(claim, prompt_tokens, output_tokens, now)
        return None

    def replace(self, told: Iterable[letters.Claimed], now: float) -> None:
        """Put what the replica has told in the place of what was known; ``judge`` is to follow."""
        before, self._held = self._held, {}
        for of in told:
            claim = before.pop(of.number, None)
            if claim is not None and of.granted_tokens not in {None, claim.granted_tokens}:
                self._quotas.end(claim, 0, 0, now)  # it was judged otherwise while the replica decided alone
                claim = None
            claim = claim or Claim(of.number, of.key, of.limits, of.begun)
            if claim.asks is None and of.prompt_tokens is not None:
                claim.asks, claim.granted_tokens = (of.prompt_tokens, of.max_tokens), of.granted_tokens
            self._quotas.hold(claim, now)
            if not of.begun or (of.prompt_tokens is not None and of.granted_tokens is None):
                self._due.append(claim)
            else:
                self._held[of.number] = claim
        self._settle(before, now)

    def judge(self, now: float) -> list[letters.Judged]:
        """Return the answers that are due to what was told."""
        due, self._due = self._due, []
        return [self._judge(claim, now) for claim in due]

    def drop(self, now: float) -> None:
        """The replica is gone."""
        self._settle(self._held, now)

    def _judge(self, claim: Claim, now: float) -> letters.Judged:
        self._quotas.judge(claim, now)
        if claim.begun:
            self._held[claim.number] = claim
        requests, tokens = map(_told, claim.left)
        if (refusal := claim.refusal) is None:
            return letters.Judged(claim.number, claim.granted_tokens, requests, tokens)
        wait = refusal.retry_after_seconds
        wait = None if wait is None else min(wait, _LONGEST_SECONDS)
        return letters.Judged(claim.number, None, requests, tokens, refusal.reason, refusal.limit, wait)

    def _settle(self, claims: dict[int, Claim], now: float) -> None:
        """End claims of which nobody tells what they used: at most what they were granted."""
        for claim in claims.values():
            self._quotas.end(claim, claim.granted_tokens or 0, 0, now)
        claims.clear()


def _told(of: Remaining | None) -> tuple[int, int, float] | None:
    return None if of is None else (of.limit, of.remaining, min(of.reset_seconds, _LONGEST_SECONDS))
