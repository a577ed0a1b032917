"""Quotas over a fleet under any interleaving of what can happen to it: how much is granted, what is left at the end."""

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_fleet_stateful import Calm, Rough, picks

from proxy.core.quota import QuotaLimits

BEAT = 0.5
REQUESTS, TOKENS, AT_ONCE = 6, 2000, 4


class Claiming(Calm):
    """Beside what else happens, requests claim of one quota, and end."""

    quotas: ClassVar[dict[str, QuotaLimits]] = {"k": QuotaLimits(REQUESTS, TOKENS, AT_ONCE)}

    def __init__(self) -> None:
        super().__init__()
        self.used: list[tuple[float, int]] = []
        self.lost_at = -100.0
        self.forgotten_requests = 0
        self.forgotten_tokens = 0

    @rule(
        pick=picks,
        prompt=st.sampled_from([None, 1, 300, 1500]),
        most=st.sampled_from([None, 0, 400]),
        count=st.integers(1, 4),
        arrives=st.booleans(),
    )
    def claim(self, pick: int, prompt: int | None, most: int | None, count: int, arrives: bool) -> None:
        for number in range(count):
            if name := self.one_of(self.awake(), pick + number):
                found = self.net.claim(str(name), prompt, most)
                if arrives and found.refusal is None:
                    self.net.arrive(str(name), prompt or 1, claim=found)

    @rule(pick=picks, share=st.sampled_from([0.0, 0.5, 1.0]))
    def settle(self, pick: int, share: float) -> None:
        """A request is over, granted or not."""
        awake = self.awake()
        there = [(name, of) for name, of in self.net.claims if name in awake]
        if there:
            name, found = there[pick % len(there)]
            if (key := (name, found.request_id)) in self.net.live():
                self.net.end(key, "gone", None)
            tokens = int((found.granted_tokens or 0) * share)
            self.net.settle(found, tokens // 2, tokens - tokens // 2)
            self.used.append((self.net.now, tokens))

    @rule(count=st.integers(1, 3))
    def lose_letters(self, count: int) -> None:
        self.net.losing += count
        self.lost_at = self.net.now

    @rule(pick=picks)
    def kill(self, pick: int) -> None:
        """What the one that is killed knows alone is forgotten: what came since it has told the others."""
        name = self.one_of(self.net.replicas, pick)
        if not name or len(self.net.replicas) < 3:
            return
        since = self.net.now - (2 * BEAT + 3 * self.net.delay if self.losses_are_long_over() else 1e9)
        self.forgotten_requests += sum(at > since for of, at in self.net.let_in.items())
        self.forgotten_requests += sum(of.pending for _, of in self.net.claims)
        self.forgotten_tokens += sum(tokens for at, tokens in self.used if at > since)
        self.forgotten_tokens += sum(of.granted_tokens or 0 for at, of in self.net.claims if at == name)
        self.net.kill(str(name))

    def losses_are_long_over(self) -> bool:
        return not self.net.losing and self.net.now > self.lost_at + 10.0

    # -- what must hold --

    def bookkeeping(self) -> None:
        """The leader holds exactly what is granted to those that are under way."""
        (leader,) = self.net.leaders
        quota = leader.claims.quotas["k"]
        under_way = [of for _, of in self.net.claims if of.begun]
        assert not [of for _, of in self.net.claims if of.pending]
        assert quota.active == len(under_way)
        assert quota.reserved == sum(of.granted_tokens or 0 for of in under_way)

    def all_is_settled(self) -> None:
        for _, of in list(self.net.claims):
            self.net.settle(of)
        self.net.run(1.0)
        (leader,) = self.net.leaders
        assert (leader.claims.quotas["k"].active, leader.claims.quotas["k"].reserved) == (0, 0)
        for replica in self.net.replicas.values():
            assert not replica.member._following._hanging

    def most(self, per_minute: int) -> float:
        """That one proxy would have granted by now."""
        return per_minute * (1 + self.net.now / 60) + 1e-6


class CalmClaims(Claiming):
    """No replica is cut off, and the store is there: all together have one quota."""

    @invariant()
    def no_more_than_one_quota_is_granted(self) -> None:
        if hasattr(self, "net"):
            assert len(self.net.let_in) <= self.most(REQUESTS) + self.forgotten_requests
            held = sum(of.granted_tokens or 0 for _, of in self.net.claims)
            used = sum(tokens for _, tokens in self.used)
            assert used + held <= self.most(TOKENS) + self.forgotten_tokens

    def settled(self) -> None:
        super().settled()
        self.bookkeeping()
        self.all_is_settled()


class OrderlyClaims(CalmClaims):
    """Besides, no letter is lost: then a leader that is killed takes next to nothing along."""

    def lose_letters(self, count: int) -> None:  # no rule
        raise AssertionError(count)

    @invariant()
    def no_more_than_the_limit_are_under_way(self) -> None:
        if hasattr(self, "net"):
            assert sum(of.begun for _, of in self.net.claims) <= AT_ONCE


class RoughClaims(Claiming, Rough):
    """Whatever happens: those that decide alone have a quota each at most, and in the end all is known."""

    @invariant()
    def each_has_one_quota_at_most(self) -> None:
        if hasattr(self, "net"):
            alone = self.net.started
            assert len(self.net.let_in) <= alone * self.most(REQUESTS) + self.forgotten_requests
            assert sum(of.begun for _, of in self.net.claims) <= alone * AT_ONCE

    def settled(self) -> None:
        super().settled()
        self.bookkeeping()
        self.all_is_settled()


TestCalmClaims = CalmClaims.TestCase
TestCalmClaims.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestOrderlyClaims = OrderlyClaims.TestCase
TestOrderlyClaims.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestRoughClaims = RoughClaims.TestCase
TestRoughClaims.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
