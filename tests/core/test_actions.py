from proxy.core.actions import Dispatch, Reject, describe
from proxy.core.request import RejectReason


def test_a_decision_is_one_line_with_its_time_to_the_microsecond() -> None:
    assert describe(Dispatch("7", "e1"), 1.5) == "1.500000 dispatch 7 e1"
    assert describe(Reject("8", RejectReason.QUEUE_FULL, 3.25), 0.1234564) == "0.123456 reject 8 queue_full"


def test_the_retry_hint_is_no_part_of_the_decision() -> None:
    assert describe(Reject("8", RejectReason.DRAINING, 1.0), 0.0) == describe(Reject("8", RejectReason.DRAINING), 0.0)
