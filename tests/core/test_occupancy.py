"""What of the KV cache stays free for whom."""

from proxy.core.fairness import Flow
from proxy.core.occupancy import Occupancy

A, B = Flow(1.0, "a"), Flow(1.0, "b")


def test_alone_a_flow_may_have_everything() -> None:
    occupancy = Occupancy()
    for n in range(50):
        occupancy.take(A, 1000, float(n))
    occupancy.give(A, 20_000)
    assert occupancy.kept_for_others(A) == 0


def test_what_a_flow_held_lately_is_kept_for_it_and_as_much_as_its_longest_request_beyond() -> None:
    occupancy = Occupancy()
    for tokens in (500, 3000):
        occupancy.take(A, tokens, 0.0)
    assert occupancy.kept_for_others(B) == 3000, "room for one more"
    occupancy.give(A, 3000)
    occupancy.give(A, 500)
    assert occupancy.kept_for_others(B) == 3500, "and for what it had"


def test_nothing_is_kept_for_one_that_waits_as_its_turn_decides() -> None:
    occupancy = Occupancy()
    occupancy.take(A, 1000, 0.0)
    occupancy.wait(A, waiting=True)
    assert occupancy.kept_for_others(B) == 0
    occupancy.wait(A, waiting=False)
    assert occupancy.kept_for_others(B) == 1000


def test_a_flow_that_is_gone_for_two_spans_keeps_nothing_and_is_forgotten() -> None:
    occupancy = Occupancy(span_seconds=60.0)
    occupancy.take(A, 1000, 0.0)
    occupancy.give(A, 1000)
    occupancy.take(B, 10, 119.0)
    assert occupancy.kept_for_others(B) == 1000
    occupancy.take(B, 10, 121.0)
    assert occupancy.kept_for_others(B) == 0
    assert len(occupancy) == 1


def test_a_flow_that_only_goes_on_streaming_keeps_what_it_has_and_no_room_beside_it() -> None:
    occupancy = Occupancy(span_seconds=60.0)
    occupancy.take(A, 1000, 0.0)
    occupancy.take(B, 10, 300.0)
    assert occupancy.kept_for_others(B) == 0
    occupancy.give(A, 1000)
    assert occupancy.kept_for_others(B) == 1000


def test_sums_that_do_not_come_back_to_nothing_keep_nothing() -> None:
    occupancy = Occupancy()
    for flow, tokens in ((A, 0.1), (B, 0.2), (Flow(1.0, "c"), 0.3)):
        occupancy.take(flow, tokens, 0.0)
    for flow in (A, B, Flow(1.0, "c")):
        occupancy.wait(flow, waiting=True)
        assert occupancy.kept_for_others(flow) >= 0
    assert occupancy.kept_for_others(A) == 0
