"""What a tenant is guaranteed goes before what is beyond, leaves nothing free for others, and is no more than told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playbook import Play

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.events import Ended, Reconfigured
from proxy.core.fairness import FairShares, Flow
from proxy.core.guarantee import Guarantees
from proxy.core.tiles import TileConfig

quick = settings(max_examples=200, derandomize=True, database=None, deadline=None)
A, B, C = (Flow(1.0, name) for name in "abc")


def release(shares: FairShares, tokens: int, now: float = 0.0) -> Flow:
    flow = shares.first(now)
    shares.open_bill(flow, now).charge(tokens, now, last=True)
    return flow


def waiting(held: dict[str, int], *flows: Flow) -> FairShares:
    """``held``: what each tenant's account holds, which is what is guaranteed for ten seconds."""
    shares = FairShares(None, {tenant: 6 * tokens for tenant, tokens in held.items()})
    for flow in flows:
        shares.enter(flow)
    return shares


class TestAccount:
    def test_it_holds_what_comes_in_ten_seconds(self) -> None:
        account = Guarantees({"a": 600})
        assert account.left("a", 0.0) == 1.0
        account.use("a", 150, 10.0)
        assert account.left("a", 10.0) == -0.5
        assert account.left("a", 15.0) == pytest.approx(0.0)
        assert account.left("a", 1000.0) == 1.0
        assert account.left("b", 0.0) == 0.0, "nothing is guaranteed"

    def test_to_look_at_it_changes_nothing(self) -> None:
        """Debug views ask at times of their own; what is decided must not depend on that."""
        looked_at, left_alone = Guarantees({"a": 777}), Guarantees({"a": 777})
        for account in (looked_at, left_alone):
            account.use("a", 1000.1, 0.3)
        for n in range(100):
            looked_at.left("a", 0.3 + 0.37 * n)
        assert looked_at.left("a", 40.0) == left_alone.left("a", 40.0)

    def test_what_was_used_stays_used_when_the_rate_changes(self) -> None:
        account = Guarantees({"a": 600, "b": 600})
        account.use("a", 100, 0.0)
        account.change({"a": 1200, "c": 60}, 0.0)
        assert account.left("a", 0.0) == 0.5
        assert list(account) == ["a", "c"]


class TestTurns:
    def test_the_guaranteed_goes_first_until_it_is_used(self) -> None:
        shares = waiting({"a": 500}, B, A)
        assert [release(shares, 200) for _ in range(5)] == [A, A, A, B, A], "600 of 500 used; then in turn"
        assert release(shares, 200, 3.0) == A, "50 of them are there again"

    def test_what_was_guaranteed_does_not_count_as_share(self) -> None:
        """Else who had a guarantee for hours would wait for as long when it once wants more."""
        shares = waiting({"a": 100_000}, A, B)
        for _ in range(101):
            assert release(shares, 1000) == A
        beyond = [release(shares, 1000) for _ in range(10)]
        assert beyond.count(A) == beyond.count(B) == 5

    def test_of_two_guarantees_the_one_goes_first_that_is_used_less(self) -> None:
        shares = waiting({"a": 30_000, "b": 10_000}, A, B, C)
        got = [release(shares, 100) for _ in range(200)]
        assert (got.count(A), got.count(B)) == (150, 50)

    def test_a_prompt_half_way_is_overtaken_only_by_those_that_have_used_less(self) -> None:
        shares = waiting({"a": 10_000, "b": 10_000}, A, B, C)
        half_way = shares.open_bill(A, 0.0)
        half_way.charge(2000, 0.0, last=False)
        assert shares.ahead(B, 0.0) < half_way.ahead(0.0) < shares.ahead(C, 0.0)
        shares.open_bill(B, 0.0).charge(5000, 0.0, last=True)
        assert half_way.ahead(0.0) < shares.ahead(B, 0.0) < shares.ahead(C, 0.0)

    def test_classes_of_a_tenant_share_its_guarantee_by_weight(self) -> None:
        heavy = Flow(3.0, "a")
        shares = waiting({"a": 1_000_000}, A, heavy, B)
        got = [release(shares, 100) for _ in range(400)]
        assert (got.count(heavy), got.count(A)) == (300, 100)

    def test_an_answer_counts_when_it_is_known_and_what_did_not_begin_costs_nothing(self) -> None:
        shares = waiting({"a": 1000}, B, A)
        bill = shares.open_bill(A, 0.0)
        bill.charge(400, 0.0, last=True)
        bill.settle(500)
        assert [f.guarantee_left for f in shares.accounts(0.0)] == pytest.approx([0.1, 0.0])
        bill = shares.open_bill(A, 0.0)
        bill.charge(400, 0.0, last=True)
        assert shares.first(0.0) == B, "400 and the 500 that its answers usually have"
        bill.cancel()
        assert shares.first(0.0) == A

    @quick
    @given(
        st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 20)), min_size=1, max_size=200), st.integers(60, 100_000)
    )
    def test_no_more_goes_first_than_is_guaranteed(self, releases: list[tuple[int, float]], limit: int) -> None:
        """In any time ``t``: what is guaranteed for ten seconds and ``t``, and one request."""
        shares = waiting({"a": limit}, A, B)
        now = used = 0.0
        for tokens, seconds in releases:
            now += seconds
            guaranteed = shares.is_guaranteed(A, now)
            if shares.first(now) == A and guaranteed:
                release(shares, tokens, now)
                used += tokens
            assert used <= limit * (1 + now / 10) + 3000 + 1e-6


ROOMY = GateConfig(tenant_headroom=0.5)


def stage(**guaranteed: int) -> Play:
    """Tenant a has been active lately and is idle; of a cache of 10,000 tokens, b holds 4,000 with a decode."""
    play = Play(kv_tokens=10_000, gate=ROOMY, tenant_guarantees=guaranteed)
    play.arrive("a0", 50, tenant="a")
    play.tokens("a0", at=0.1)
    play.end("a0")
    play.arrive("b0", 4000, tenant="b")
    play.tokens("b0", at=0.5)
    return play


class TestRelease:
    def test_only_what_is_beyond_leaves_head_room(self) -> None:
        assert stage().arrive("b1", 1500, tenant="b", at=1.0) == []
        assert stage(b=60_000).arrive("b1", 1500, tenant="b", at=1.0) == ["dispatch b1 e0"]
        assert stage(b=3000).arrive("b1", 1500, tenant="b", at=1.0) == [], "b0 has used it up"

    def test_it_is_there_again_after_a_while(self) -> None:
        play = stage(b=3000)
        play.arrive("b1", 1500, tenant="b", at=1.0)
        assert play.tokens("b0", at=60.0) == []
        assert play.tokens("b0", at=80.0) == ["dispatch b1 e0"]

    @pytest.mark.parametrize("tiles", [None, TileConfig()])
    def test_who_is_guaranteed_does_not_wait_behind_one_that_was_held_back(self, tiles: TileConfig | None) -> None:
        """Head-room makes a flood the one that was served least; a guarantee comes before that."""
        for guaranteed, first in (({}, "b1"), ({"a": 100_000}, "a2")):
            play = Play(max_num_seqs=1, tiles=tiles, tenant_guarantees=guaranteed)
            play.arrive("b0", 10, tenant="b")
            play.arrive("a0", 4000, tenant="a", at=0.1)
            play.end("b0", at=0.2)
            play.arrive("b1", 100, tenant="b", at=0.3)
            play.arrive("a2", 100, tenant="a", at=0.3)
            assert play.end("a0", at=0.5) == [f"dispatch {first} e0"]

    def test_it_can_be_changed_while_it_runs(self) -> None:
        play = stage()
        assert play.arrive("b1", 1500, tenant="b", at=1.0) == []
        config = SchedulerConfig(gate=ROOMY, tenant_guarantees={"b": 100_000})
        assert play.handle(Reconfigured(config), 1.1) == ["dispatch b1 e0"]

    def test_all_of_it_is_accounted_for_at_the_end(self) -> None:
        play = stage(b=30_000)
        play.arrive("b1", 500, tenant="b", at=1.0)
        play.handle(Ended("b1", 10), 1.0)
        ((_, shares),) = play.scheduler.ledger.backlog.shares()
        (account,) = (f for f in shares.accounts(1.0) if f.tenant == "b")
        assert account.guarantee_left == pytest.approx((5000 - 4000 + 0.9 * 500 - 500 - 10) / 5000)


def test_a_guarantee_is_at_least_a_token() -> None:
    with pytest.raises(ValueError, match="guaranteed"):
        SchedulerConfig(tenant_guarantees={"a": 0})
