"""The claims of a fleet's replica on its API keys' quotas: judged here while it decides, else by the leader.

An end that the leader may not have heard of is told to the next one. What is used while the replica decides alone is
used of a part of each quota, and told to the next leader as well.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from proxy.core.claims import Claim, Claims
from proxy.core.fleet import letters
from proxy.core.quota import QuotaReason, QuotaRefusal, Remaining, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.core.fleet.letters import Note
    from proxy.core.quota import QuotaLimits


class Claiming(Claims):
    """See the module's docstring."""

    def __init__(self, decides: Callable[[float], bool]) -> None:
        """``decides`` tells whether this replica decides at a time."""
        super().__init__()
        self.tell: Callable[[Note], None] = lambda _: None
        """Tells the leader, if there is a line to it."""
        self.answered: list[Claim] = []
        """Claims whose answers have come since the shell last looked, and emptied this."""
        self._decides = decides
        self._open: dict[int, Claim] = {}
        self._ended: deque[Claim] = deque()  # of those, which are over
        self._owed: dict[str, Usage] = {}
        self._knows_us = 0  # epoch of the leader that has heard all of this

    def begin(self, key: str, limits: QuotaLimits, now: float) -> Claim:
        claim = Claim(next(self._numbers), key, limits)
        if not limits.any:
            claim.begun = True
            return claim  # nobody counts it
        if self._decides(now):
            self.quotas.judge(claim, now)
        else:
            self.tell(letters.Claims(claim.number, key, limits))
        if claim.refusal is None:
            self._open[claim.number] = claim
        return claim

    def reserve(self, claim: Claim, prompt_tokens: int, max_tokens: int | None, now: float) -> None:
        decides = self._decides(now)
        if claim.limits.tokens_per_minute is None or claim.number not in self._open:
            return
        claim.asks = prompt_tokens, max_tokens
        if decides:
            self.quotas.judge(claim, now)
        else:
            self.tell(letters.Reserves(claim.number, prompt_tokens, max_tokens))

    def end(self, claim: Claim, now: float, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        decides = self._decides(now)
        if claim.used is not None:
            return
        claim.used = prompt_tokens, output_tokens
        if claim.number not in self._open:
            return
        if decides:
            del self._open[claim.number]
            self.quotas.end(claim, prompt_tokens, output_tokens, now)
            return
        self._ended.append(claim)
        self.tell(letters.Settles(claim.number, prompt_tokens, output_tokens))

    @property
    def holds(self) -> bool:
        """Whether a request is under way that was granted something."""
        return any(claim.begun and claim.used is None for claim in self._open.values())

    # -- another one decides --

    def announced(self) -> list[letters.Claimed]:
        """Return what a leader has to know of all claims; what it has to know of their ends is to follow."""
        return [_claimed(claim) for claim in self._open.values() if claim.begun or claim.used is None]

    def ends(self) -> list[letters.Settles]:
        """Return the ends that a new leader has to know of."""
        for claim in self._ended:
            claim.sent_in = 0
        return [letters.Settles(claim.number, *claim.used) for claim in self._ended if claim.used is not None]

    @property
    def owed(self) -> dict[str, tuple[float, float]]:
        """What has been used that no leader knows of."""
        return {key: (usage.requests, usage.tokens) for key, usage in self._owed.items()}

    def spent(self, epoch: int, now: float) -> letters.Spent | None:
        """Return what is known here of what was used, for the leader of an epoch that may not know of it."""
        return None if epoch == self._knows_us else spent_of(self.quotas.known(now, all_keys=True))

    def welcome(self, epoch: int) -> None:
        """The leader knows what is owed, and what we knew."""
        self._owed.clear()
        self._knows_us = epoch

    def sent(self, number: int) -> None:
        """All that is told has gone out, in letters up to this one."""
        for claim in reversed(self._ended):
            if claim.sent_in:
                break
            claim.sent_in = number

    def heard(self, number: int) -> None:
        """The leader has had our letters up to this one."""
        while self._ended and 0 < self._ended[0].sent_in <= number:
            self._open.pop(self._ended.popleft().number, None)

    def answer(self, note: letters.Judged) -> Claim | None:
        """Take in the leader's answer, and return the claim if nothing of it is pending any more."""
        claim = self._open.get(note.number)
        if claim is None:
            return None
        claim.left = _remaining(note.requests), _remaining(note.tokens)
        if note.reason is None:
            claim.begun = True
            if note.granted_tokens is not None:
                claim.granted_tokens = note.granted_tokens
        else:
            claim.refusal = QuotaRefusal(note.reason, note.limit, note.retry_after_seconds)
            claim.begun = note.reason is QuotaReason.TOKENS
        if claim.pending:
            return None
        self._close(claim)
        return claim

    def learn(self, note: letters.Spent, now: float) -> None:
        """Take in what the leader knows."""
        for key, (requests, tokens, usual_output) in note.keys.items():
            self.quotas.learn(key, Usage(requests, tokens), usual_output, now)

    # -- this one decides --

    def decide(self, parts: int, now: float) -> set[str]:
        """Judge from now on, by one of so many parts of each quota; the ids of requests that must not go on."""
        self.quotas.divide(parts, now)
        for key, usage in self._owed.items():
            self.quotas.add(key, usage, now)
        self._owed.clear()
        for claim in self._open.values():
            self.quotas.hold(claim, now)
        while self._ended:
            claim = self._ended.popleft()
            self._open.pop(claim.number, None)
            if claim.used is not None:
                self.quotas.end(claim, *claim.used, now)
        judged = [claim for claim in self._open.values() if claim.pending]
        for claim in judged:
            self.quotas.judge(claim, now)
            self._close(claim)
        return {claim.request_id for claim in judged if claim.refusal is not None}

    def stop(self, now: float, *, alone: bool) -> None:
        """Judge no more. ``alone``: it was done by a part of each quota."""
        if alone:
            for key, usage in self.quotas.unite(now).items():
                self._owed[key] = self._owed.get(key, Usage()) + usage
        self.quotas.let_go()
        for claim in self._open.values():
            claim.quota = claim.lease = None

    # -- --

    def _close(self, claim: Claim) -> None:
        """Tell the shell of a claim of which nothing is pending any more; one that was not let in holds nothing."""
        if claim.refusal is not None and not claim.begun:
            self._open.pop(claim.number, None)
        if claim.used is None:
            self.answered.append(claim)


def spent_of(known: Mapping[str, tuple[Usage, float]]) -> letters.Spent:
    """Write what ``Quotas.known`` tells."""
    return letters.Spent({key: (usage.requests, usage.tokens, usual) for key, (usage, usual) in known.items()})


def _claimed(claim: Claim) -> letters.Claimed:
    prompt, most = (None, None) if claim.refusal is not None else (claim.asks or (None, None))
    return letters.Claimed(claim.number, claim.key, claim.limits, claim.begun, prompt, most, claim.granted_tokens)


def _remaining(told: tuple[int, int, float] | None) -> Remaining | None:
    return None if told is None else Remaining(*told)
