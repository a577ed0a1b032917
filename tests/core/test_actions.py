from proxy.core.actions import Dispatch, Reject, Slice, describe
from proxy.core.request import RejectReason


def test_a_decision_is_one_line_with_its_time_to_the_microsecond() -> None:
    assert describe(Dispatch("7", "e1"), 1.5) == "1.500000 dispatch 7 e1"
    assert describe(Reject("8", RejectReason.QUEUE_FULL, 3.25), 0.1234564) == "0.123456 reject 8 queue_full"


def test_the_retry_hint_is_no_part_of_the_decision() -> None:
    assert describe(Reject("8", RejectReason.DRAINING, 1.0), 0.0) == describe(Reject("8", RejectReason.DRAINING), 0.0)


def test_a_slice_is_told_by_its_end_and_not_by_its_number() -> None:
    assert describe(Slice("7", "e1", 256, held_tokens=128, number=3), 1.5) == "1.500000 slice 7 e1 256"
    assert describe(Slice("7", "e1", 256, 0, 9), 1.5) == describe(Slice("7", "e1", 256, 128, 3), 1.5)


def test_no_two_slices_have_the_same_id() -> None:
    assert Slice("7", "x", 128, 0, 3).slice_id == "7/3"
    assert Slice("7", "x", 128, 0, 4).slice_id == "7/4"
