import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.core.quota import Quota, QuotaLease, QuotaLimits, QuotaReason, QuotaRefusal, TokenBucket, Usage

times = st.integers(0, 240).map(float)


def begun(quota: Quota, now: float = 0.0) -> QuotaLease:
    lease = quota.begin(now)
    assert isinstance(lease, QuotaLease)
    return lease


def refused(outcome: object) -> QuotaRefusal:
    assert isinstance(outcome, QuotaRefusal)
    return outcome


@given(st.integers(1, 50), st.lists(times, max_size=200).map(sorted))
def test_no_window_has_more_requests_than_the_limit_and_what_refills_in_it(limit: int, arrivals: list[float]) -> None:
    quota = Quota(QuotaLimits(requests_per_minute=limit), 0.0)
    admitted = [now for now in arrivals if isinstance(quota.begin(now), QuotaLease)]
    for first, begin in enumerate(admitted):
        for last, end in enumerate(admitted[first:], first):
            assert last - first + 1 <= limit * (1 + (end - begin) / 60) + 1e-6
    # Nor fewer: who comes after the bucket is full again finds all of it.
    if all(later - earlier >= 60 / limit + 1e-9 for earlier, later in pairwise(arrivals)):
        assert admitted == arrivals


@given(
    st.integers(10, 1000),
    st.lists(st.tuples(times, st.integers(0, 400), st.integers(0, 400), times, st.floats(0, 1)), max_size=60),
)
def test_no_window_uses_more_tokens_than_the_limit_and_what_refills_in_it(
    limit: int, requests: list[tuple[float, int, int, float, float]]
) -> None:
    quota = Quota(QuotaLimits(tokens_per_minute=limit), 0.0)
    events = [(start, 0, n) for n, (start, *_) in enumerate(requests)]
    leases: dict[int, QuotaLease] = {}
    used: list[tuple[float, int]] = []
    while events:
        events.sort()
        now, kind, n = events.pop(0)
        _, prompt, most, lasts, share = requests[n]
        if kind == 0:
            leases[n] = begun(quota, now)
            if quota.reserve(leases[n], prompt, most, now) is None:
                events.append((now + lasts, 1, n))
            else:
                quota.end(leases[n], now)
        else:
            output = min(int(most * share), max(0, limit - prompt))
            quota.end(leases[n], now, prompt_tokens=prompt, output_tokens=output)
            used.append((now, prompt + output))
    for first, (begin, _) in enumerate(used):
        for last, (end, _) in enumerate(used[first:], first):
            assert sum(tokens for _, tokens in used[first : last + 1]) <= limit * (1 + (end - begin) / 60) + 1e-6


class QuotaMachine(RuleBasedStateMachine):
    """Whatever comes, in whatever order, what is held is what the open requests hold, and use is booked once."""

    @initialize(requests=st.none() | st.integers(1, 20), tokens=st.none() | st.integers(1, 500))
    def start(self, requests: int | None, tokens: int | None) -> None:
        self.now = 0.0
        self.quota = Quota(QuotaLimits(requests, tokens, 3), 0.0)
        self.open: list[QuotaLease] = []
        self.ended: list[QuotaLease] = []

    @rule(seconds=st.integers(0, 90))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(prompt=st.integers(0, 600), most=st.none() | st.integers(0, 600))
    def arrive(self, prompt: int, most: int | None) -> None:
        before = self.quota.requests(self.now)
        outcome = self.quota.begin(self.now)
        if isinstance(outcome, QuotaRefusal):
            assert self.quota.requests(self.now) == before
            return
        refusal = self.quota.reserve(outcome, prompt, most, self.now)
        if refusal is None:
            self.open.append(outcome)
            return
        assert outcome.reserved_tokens == 0
        self.quota.end(outcome, self.now)
        self.ended.append(outcome)
        assert refusal.retry_after_seconds is None or refusal.retry_after_seconds > 0

    @rule(used=st.integers(0, 900))
    def end(self, used: int) -> None:
        if self.open:
            lease = self.open.pop()
            before = self.quota.tokens(self.now)
            held = lease.reserved_tokens
            self.quota.end(lease, self.now, prompt_tokens=used)
            self.ended.append(lease)
            after = self.quota.tokens(self.now)
            if before is not None and after is not None and before.remaining and after.remaining:
                assert after.remaining - before.remaining == pytest.approx(held - used, abs=1)

    @rule()
    def end_again(self) -> None:
        if self.ended:
            before = self.quota.tokens(self.now), self.quota.active
            self.quota.end(self.ended[-1], self.now, prompt_tokens=100)
            assert (self.quota.tokens(self.now), self.quota.active) == before

    @rule(requests=st.none() | st.integers(1, 20), tokens=st.none() | st.integers(1, 500))
    def change(self, requests: int | None, tokens: int | None) -> None:
        self.quota.change(QuotaLimits(requests, tokens, 3), self.now)

    @invariant()
    def what_is_held_is_held_by_somebody(self) -> None:
        assert self.quota.active == len(self.open)
        assert self.quota.reserved == sum(lease.reserved_tokens for lease in self.open)
        if self.quota._tokens is not None:
            assert self.quota._tokens.level(self.now) <= self.quota._tokens.limit


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_refusal_says_when_to_come_back_and_that_is_right() -> None:
    quota = Quota(QuotaLimits(requests_per_minute=6, tokens_per_minute=60), 0.0)
    for _ in range(6):
        quota.end(begun(quota), 0.0)
    told = refused(quota.begin(0.0))
    assert (told.reason, told.limit, told.retry_after_seconds) == (QuotaReason.REQUESTS, 6, 10.0)
    assert isinstance(quota.begin(9.9), QuotaRefusal)
    lease = begun(quota, 10.0)
    assert quota.reserve(lease, 20, 40, 10.0) is None
    quota.end(lease, 10.0, prompt_tokens=20, output_tokens=40)
    lease = begun(quota, 20.0)
    told = refused(quota.reserve(lease, 10, 20, 20.0))
    assert (told.reason, told.retry_after_seconds) == (QuotaReason.TOKENS, 20.0)
    assert quota.reserve(lease, 10, 20, 40.0) is None


def test_what_was_reserved_and_not_used_is_there_again() -> None:
    quota = Quota(QuotaLimits(tokens_per_minute=100), 0.0)
    lease = begun(quota)
    assert quota.reserve(lease, 10, 90, 0.0) is None
    assert refused(quota.reserve(begun(quota), 1, 0, 0.0)).reason == QuotaReason.TOKENS
    quota.end(lease, 0.0, prompt_tokens=10, output_tokens=5)
    left = quota.tokens(0.0)
    assert left is not None
    assert (left.limit, left.remaining) == (100, 85)
    assert left.reset_seconds == pytest.approx(9.0)


def test_use_beyond_the_reservation_is_a_debt_that_is_paid_first() -> None:
    quota = Quota(QuotaLimits(tokens_per_minute=60), 0.0)
    lease = begun(quota)
    assert quota.reserve(lease, 10, 10, 0.0) is None
    quota.end(lease, 0.0, prompt_tokens=100)
    left = quota.tokens(0.0)
    assert left is not None
    assert left.remaining == 0
    assert refused(quota.reserve(begun(quota), 1, 0, 0.0)).retry_after_seconds == pytest.approx(41.0)


def test_a_prompt_beyond_the_whole_limit_can_never_go_and_an_output_beyond_it_can() -> None:
    quota = Quota(QuotaLimits(tokens_per_minute=100), 0.0)
    assert refused(quota.reserve(begun(quota), 101, 0, 0.0)).retry_after_seconds is None
    assert quota.reserve(begun(quota), 10, 100_000, 0.0) is None


def test_an_answer_without_a_limit_reserves_what_answers_of_the_key_usually_have() -> None:
    quota = Quota(QuotaLimits(tokens_per_minute=1000), 0.0)
    for minute in range(100):
        lease = begun(quota, 60.0 * minute)
        quota.end(lease, 60.0 * minute, output_tokens=20)
    lease = begun(quota, 6000.0)
    assert quota.reserve(lease, 10, None, 6000.0) is None
    assert lease.reserved_tokens == pytest.approx(30, abs=1)


def test_no_more_run_at_once_than_may() -> None:
    quota = Quota(QuotaLimits(concurrency=2), 0.0)
    first, _ = begun(quota), begun(quota)
    assert refused(quota.begin(0.0)).reason == QuotaReason.CONCURRENCY
    quota.end(first, 0.0)
    begun(quota)


def test_without_limits_nothing_is_counted_against_anybody() -> None:
    quota = Quota(QuotaLimits(), 0.0)
    assert quota.reserve(begun(quota), 10**9, None, 0.0) is None
    assert quota.requests(0.0) is None
    assert quota.tokens(0.0) is None


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = TokenBucket(100, 0.0)
    bucket.take(30, 0.0)
    bucket.resize(50, 0.0)
    assert bucket.level(0.0) == 20
    bucket.resize(200, 0.0)
    assert bucket.level(0.0) == 170
    bucket.resize(10, 0.0)
    assert bucket.level(0.0) == -20


def test_a_changed_limit_leaves_the_room_as_it_was_unless_told_otherwise() -> None:
    bucket = TokenBucket(60, 0.0, 10.0)
    bucket.resize(600, 0.0)
    assert (bucket.capacity, bucket.level(0.0)) == (100, 100)
    bucket.resize(600, 0.0, 60.0)
    assert bucket.capacity == 600


def test_a_clock_that_stands_still_refills_nothing() -> None:
    bucket = TokenBucket(60, 5.0)
    bucket.take(60, 5.0)
    assert bucket.level(5.0) == 0
    assert bucket.level(4.0) == 0
    assert math.isclose(bucket.level(6.0), 1.0)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        QuotaLimits(requests_per_minute=0)


def emptied(tokens_per_minute: int) -> Quota:
    """A quota of which all was used at time 0."""
    quota = Quota(QuotaLimits(tokens_per_minute=tokens_per_minute), 0.0)
    lease = begun(quota)
    assert quota.reserve(lease, tokens_per_minute, 0, 0.0) is None
    quota.end(lease, 0.0, prompt_tokens=tokens_per_minute)
    return quota


def told_seconds(quota: Quota, tokens: int, now: float = 0.0) -> float:
    seconds = refused(quota.reserve(begun(quota, now), tokens, 0, now)).retry_after_seconds
    assert seconds is not None
    return seconds


def test_those_who_are_refused_at_once_are_told_to_come_one_after_the_other_and_each_gets_in() -> None:
    quota = emptied(60)
    told = [told_seconds(quota, tokens) for tokens in (20, 10, 30)]
    assert told == pytest.approx([20.0, 30.0, 60.0])
    for at, tokens in zip(told, (20, 10, 30), strict=True):
        lease = begun(quota, at)
        assert quota.reserve(lease, tokens, 0, at + 1e-6) is None
        quota.end(lease, at + 1e-6, prompt_tokens=tokens)


def test_a_line_that_is_over_delays_nobody() -> None:
    quota = emptied(60)
    assert told_seconds(quota, 20) == pytest.approx(20.0)
    assert told_seconds(quota, 40, now=30.0) == pytest.approx(10.0), "nobody came back, and 30 are there"


def test_nobody_is_told_to_wait_for_longer_than_the_longest_line_holds() -> None:
    quota = emptied(60)
    told = [told_seconds(quota, 30) for _ in range(100)]
    assert told[:4] == pytest.approx([30.0, 60.0, 90.0, 120.0])
    assert all(60 <= seconds <= 120 for seconds in told[4:])
    assert len({round(seconds) for seconds in told[4:]}) > 30, "they are spread"
    assert told_seconds(emptied(60), 60) == pytest.approx(60.0)


def test_requests_a_minute_have_a_line_too() -> None:
    quota = Quota(QuotaLimits(requests_per_minute=6), 0.0)
    for _ in range(6):
        quota.end(begun(quota), 0.0)
    assert [refused(quota.begin(0.0)).retry_after_seconds for _ in range(3)] == pytest.approx([10.0, 20.0, 30.0])


@given(
    st.integers(1, 100),
    st.integers(2, 7),
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 6), times), max_size=200),
)
def test_parts_grant_no_more_than_the_whole_and_a_request_each(
    limit: int, parts: int, before: int, arrivals: list[tuple[int, float]]
) -> None:
    whole = [Quota(QuotaLimits(requests_per_minute=limit, concurrency=limit), 0.0) for _ in range(parts)]
    for quota in whole:
        quota.set_used(Usage(min(limit, before), 0.0), 0.0)
        quota.divide(parts, 0.0)
    let_in, open_leases = 0, [0] * parts
    for of, now in sorted(arrivals, key=lambda arrival: arrival[1]):
        if of < parts and isinstance(whole[of].begin(now), QuotaLease):
            let_in += 1
            open_leases[of] += 1
            room = max(limit, parts)
            assert let_in <= room - min(limit, before) + limit * now / 60 + (parts if limit < parts else 0) + 1e-6
            assert sum(open_leases) <= room


def test_what_parts_have_used_is_used_of_the_whole() -> None:
    parts = [Quota(QuotaLimits(60, 6000), 0.0) for _ in range(3)]
    for number, quota in enumerate(parts):
        quota.set_used(Usage(30.0, 3000.0), 0.0)
        quota.divide(3, 0.0)
        assert quota.used(0.0) == Usage(10.0, 1000.0)
        quota.end(begun(quota), 0.0, prompt_tokens=100 * number)
    found = [quota.unite(0.0) for quota in parts]
    assert found == [Usage(1.0, 0.0), Usage(1.0, 100.0), Usage(1.0, 200.0)]
    assert all(quota.used(0.0) == Usage(30.0, 3000.0) for quota in parts), "of which each knew"


def test_usage_of_nothing_is_false() -> None:
    assert not any([Usage(), Usage(0.0, -0.0)])
    assert all([Usage(1.0), Usage(tokens=0.5)])


def test_what_was_used_before_a_part_and_has_come_back_is_not_used_of_the_whole() -> None:
    part = Quota(QuotaLimits(60, 6000), 0.0)
    part.set_used(Usage(30.0, 3000.0), 0.0)
    part.divide(3, 0.0)
    part.end(begun(part), 0.0, prompt_tokens=1500)
    found = part.unite(20.0)
    assert (found.requests, found.tokens) == pytest.approx((1.0, 1500.0))
    known = part.used(20.0)
    assert (known.requests, known.tokens) == pytest.approx((10.0, 1000.0))
    part.divide(3, 20.0)
    assert part.unite(50.0) == part.used(50.0) == Usage()
