"""Fair shares: what each flow is served while several wait."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.fairness import OUTPUT_PRICE, FairShares, Flow

quick = settings(max_examples=200, derandomize=True, database=None, deadline=None)
A, B, C = (Flow(1.0, name) for name in "abc")
LONGEST = 8000
costs = st.integers(1, LONGEST)


def release(shares: FairShares, tokens: int, now: float = 0.0) -> Flow:
    """Release a prompt of whoever is next; nothing is known of its output."""
    flow = shares.first(now)
    shares.open_bill(flow, now).charge(tokens, now, last=True)
    return flow


def served(shares: FairShares, tokens: list[int], now: float = 0.0) -> dict[Flow, int]:
    got: dict[Flow, int] = {}
    for amount in tokens:
        flow = release(shares, amount, now)
        got[flow] = got.get(flow, 0) + amount
    return got


def test_two_tenants_that_both_wait_take_turns() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.enter(B)
    assert [release(shares, 100) for _ in range(4)] == [A, B, A, B]


def test_tokens_count_and_not_requests() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.enter(B)
    release(shares, 1000)  # a's
    assert [release(shares, 250) for _ in range(5)] == [B, B, B, B, A]


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much() -> None:
    shares = FairShares({"a": 2.0})
    shares.enter(A)
    shares.enter(B)
    got = served(shares, [100] * 300)
    assert got == {A: 20_000, B: 10_000}


@quick
@given(st.lists(costs, min_size=1, max_size=200), st.lists(costs, max_size=20), st.floats(0.2, 5), st.floats(0.2, 5))
def test_of_two_that_wait_all_the_time_none_is_served_more_than_a_prompt_of_each_beyond_the_other(
    tokens: list[int], alone: list[int], weight_a: float, weight_b: float
) -> None:
    """The bound of start-time fair queueing, at every moment, also after one of them was alone for a while."""
    shares = FairShares({"a": weight_a, "b": weight_b})
    shares.enter(B)
    for amount in alone:
        release(shares, amount)
    shares.enter(A)
    got = {A: 0.0, B: 0.0}
    for amount in tokens:
        flow = release(shares, amount)
        got[flow] += amount
        assert abs(got[A] / weight_a - got[B] / weight_b) <= LONGEST / weight_a + LONGEST / weight_b + 1e-6


@quick
@given(st.lists(costs, min_size=2, max_size=300), st.integers(2, 6), st.lists(st.floats(0.25, 4), min_size=6))
def test_nobody_starves(tokens: list[int], flows: int, weights: list[float]) -> None:
    """Between two releases of a flow, another gets what its weight says for the first, and one prompt more."""
    names = [Flow(1.0, str(n)) for n in range(flows)]
    weight = {flow: weights[n] for n, flow in enumerate(names)}
    shares = FairShares({flow.tenant: w for flow, w in weight.items()})
    for flow in names:
        shares.enter(flow)
    since: dict[Flow, dict[Flow, int]] = {flow: dict.fromkeys(names, 0) for flow in names}
    last: dict[Flow, float] = {}
    for amount in tokens:
        flow = release(shares, amount)
        for other in names:
            since[other][flow] += amount
            if other in last and other is not flow:
                assert since[other][flow] <= weight[flow] * last[other] + 2 * LONGEST + 1e-6
        since[flow] = dict.fromkeys(names, 0)
        last[flow] = amount / weight[flow]


def test_one_that_comes_back_may_take_up_what_it_left_unused_lately() -> None:
    shares = FairShares(credit_seconds=10.0)
    shares.enter(A)
    release(shares, 100)
    shares.leave(A)
    shares.enter(B)
    for second in range(100):
        release(shares, 1000, float(second))
    shares.enter(A)
    in_turn = [release(shares, 1000, 100.0) for _ in range(30)]
    assert set(in_turn[:10]) == {A}, "b was served 10,000 to 20,000 tokens in the last one or two spans"
    assert B in in_turn[:23]


def test_unused_shares_are_not_hoarded() -> None:
    shares = FairShares(credit_seconds=1.0)
    shares.enter(A)
    release(shares, 100)
    shares.leave(A)
    shares.enter(B)
    for second in range(1000):
        release(shares, 1000, float(second))
    shares.enter(A)
    got = served(shares, [1000] * 20, 1000.0)
    assert got[A] - got[B] <= 4000, "a thousand spans later a's right is that of the last two"


def test_a_name_made_up_now_gets_no_more_than_those_who_wait() -> None:
    shares = FairShares()
    shares.enter(B)
    for second in range(100):
        release(shares, 1000, float(second))
    for name in ("x", "y", "z"):
        shares.enter(Flow(1.0, name))
    got = served(shares, [1000] * 40, 100.0)
    assert max(got.values()) - min(got.values()) <= 1000


def test_output_tokens_count_when_the_request_ends() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.enter(B)
    bill = shares.open_bill(A, 0.0)
    bill.charge(100, 0.0, last=True)
    release(shares, 100)  # b's
    bill.settle(450)
    assert [release(shares, 100) for _ in range(10)] == [B] * int(OUTPUT_PRICE * 450 / 100) + [A]


def test_outputs_are_expected_as_long_as_the_last_ones_were() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.enter(B)
    bill = shares.open_bill(A, 0.0)
    bill.charge(100, 0.0, last=True)
    bill.settle(50)
    assert release(shares, 200) == B
    bill = shares.open_bill(A, 0.0)
    bill.charge(100, 0.0, last=True)
    assert [release(shares, 100) for _ in range(2)] == [B, B], "a is charged 100 for its prompt and 100 for its output"


def test_what_an_engine_did_not_start_costs_nothing() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.enter(B)
    bill = shares.open_bill(A, 0.0)
    bill.charge(5000, 0.0, last=True)
    assert shares.first(0.0) == B
    bill.cancel()
    assert shares.first(0.0) == A


def test_a_prompt_in_pieces_costs_as_much_as_a_whole_one() -> None:
    shares = FairShares()
    shares.enter(A)
    shares.enter(B)
    bill = shares.open_bill(A, 0.0)
    for upto in (100, 250, 400):
        bill.charge(upto, 0.0, last=upto == 400)
    assert [release(shares, 200) for _ in range(3)] == [B, B, A]


def test_classes_of_other_weights_share_before_their_tenants_do() -> None:
    """Many tenants of the light class together get no more than one quarter beside a single one of the heavy class."""
    shares = FairShares()
    heavy = Flow(3.0, "one")
    shares.enter(heavy)
    for n in range(20):
        shares.enter(Flow(1.0, f"t{n}"))
    got = served(shares, [100] * 400)
    assert got[heavy] == pytest.approx(30_000, abs=200)
    light = [tokens for flow, tokens in got.items() if flow != heavy]
    assert max(light) - min(light) <= 100


def test_a_class_that_wants_less_than_its_share_goes_first() -> None:
    shares = FairShares()
    heavy, light = Flow(3.0, ""), Flow(1.0, "")
    shares.enter(light)
    for second in range(200):
        release(shares, 900, float(second))
        shares.enter(heavy)
        assert release(shares, 100, float(second)) == heavy or second < 1
        shares.leave(heavy)


def test_the_flows_remembered_are_bounded() -> None:
    shares = FairShares(remembered=10)
    for n in range(1000):
        flow = Flow(1.0, str(n))
        shares.enter(flow)
        release(shares, 10, float(n))
        shares.leave(flow)
    assert len(shares._tenants[1.0]._counters) == 10


def test_a_bill_of_a_flow_that_was_forgotten_is_paid_by_nobody() -> None:
    shares = FairShares(remembered=1)
    shares.enter(A)
    bill = shares.open_bill(A, 0.0)
    shares.leave(A)
    for other in (B, C):
        shares.enter(other)
        shares.leave(other)
    bill.charge(100, 0.0, last=True)
    bill.settle(10)
    shares.enter(A)
    assert shares.first(0.0) == A


def test_the_share_of_a_flow_is_that_of_its_class_and_in_it_that_of_its_tenant() -> None:
    shares = FairShares({"b": 3.0})
    assert shares.share_of(A) == 1.0
    shares.enter(A)
    assert shares.share_of(A) == 1.0
    assert shares.share_of(B) == pytest.approx(0.75), "beside a"
    shares.enter(B)
    assert shares.share_of(A) == pytest.approx(0.25)
    heavy = Flow(4.0, "a")
    assert shares.share_of(heavy) == pytest.approx(0.8)
    shares.enter(heavy)
    assert shares.share_of(B) == pytest.approx(0.2 * 0.75)
    for flow in (A, B, heavy):
        shares.leave(flow)
    assert shares.share_of(C) == 1.0
