"""The order inside one flow: overdue, urgent, by key, hopeless."""

from builders import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.lane import Band, Lane, Pace, Waiting, urgency
from proxy.core.ordering import shortest_prompt_first
from proxy.core.request import RELAXED, RequestClass

quick = settings(max_examples=150, derandomize=True, database=None, deadline=None)
KEY = shortest_prompt_first(10.0)
PACE = Pace(lead_seconds=0.1, seconds_per_token=0.001)


def waiting(
    name: str, prompt_tokens: int = 100, *, ttft: float | None = None, arrived_at: float = 0.0, number: int = 0
) -> Waiting:
    kind = RELAXED if ttft is None else RequestClass("soon", ttft_seconds=ttft)
    request = make_request(name, prompt_tokens, request_class=kind)
    return Waiting(request, arrived_at, KEY(prompt_tokens, arrived_at), number)


def lane_of(*items: Waiting, max_wait_seconds: float = 60.0) -> Lane:
    lane = Lane(max_wait_seconds)
    for item in items:
        lane.push(item)
    return lane


def drained(lane: Lane, now: float, pace: Pace = PACE) -> list[str]:
    names = []
    while lane:
        head = lane.head(now, pace)
        names.append(head.request.id)
        lane.remove(head)
    return names


def test_a_long_prompt_goes_before_short_ones_when_its_deadline_comes_near() -> None:
    """1,000 tokens take 1.1 s: with 4 s promised it has to start by 2.9 s, and is urgent from 1.8 s on."""
    lane = lane_of(waiting("long", 1000, ttft=4.0), waiting("short", 10, number=1))
    assert lane.head(1.79, PACE).request.id == "short"
    assert lane.head(1.81, PACE).request.id == "long"


def test_of_the_urgent_the_one_with_the_earliest_deadline_goes_first() -> None:
    lane = lane_of(waiting("a", 1000, ttft=3.1), waiting("b", 1000, ttft=3.0, number=1))
    assert drained(lane, now=1.5) == ["b", "a"]


def test_one_that_cannot_be_in_time_any_more_goes_last_until_it_is_overdue() -> None:
    lane = lane_of(waiting("late", 10, ttft=0.5), waiting("other", 5000, arrived_at=1.0, number=1))
    assert lane.head(0.6, PACE).request.id == "other"
    assert lane.head(59.9, PACE).request.id == "other"
    assert lane.head(60.0, PACE).request.id == "late"


def test_where_some_are_hopeless_the_shortest_of_the_others_goes_before_the_urgent() -> None:
    """Overload: for each long one that is served in time several short ones would be late."""
    lane = lane_of(
        waiting("hopeless", 3000, ttft=1.0),
        waiting("urgent", 1000, ttft=3.0, number=1),
        waiting("short", 10, arrived_at=1.0, number=2),
    )
    assert drained(lane, now=1.5) == ["short", "urgent", "hopeless"]


def test_a_slower_engine_makes_urgent_earlier_even_of_those_that_wait_already() -> None:
    lane = lane_of(waiting("long", 1000, ttft=4.0), waiting("short", 10, number=1))
    assert lane.head(0.0, PACE).request.id == "short"
    slow = Pace(0.1, 0.0015)  # 1.6 s: urgent from 0.8 s on
    assert lane.head(1.0, slow).request.id == "long"


def test_without_deadlines_the_pace_does_not_matter() -> None:
    items = [waiting(str(n), 1 + (37 * n) % 101, number=n) for n in range(50)]
    assert drained(lane_of(*items), 3.0) == drained(lane_of(*items), 3.0, Pace(9.0, 9.0))


def test_one_is_removed_from_whatever_band_it_is_in() -> None:
    hopeless, urgent = waiting("hopeless", 3000, ttft=1.0), waiting("urgent", 1000, ttft=3.0, number=1)
    plain = waiting("plain", 10, number=2)
    lane = lane_of(hopeless, urgent, plain)
    lane.head(1.5, PACE)
    for item in (urgent, hopeless, plain):
        lane.remove(item)
    assert not lane
    assert not lane._checks
    assert not lane._timed


requests = st.lists(
    st.tuples(st.integers(1, 4000), st.sampled_from([None, 0.5, 2.0, 8.0]), st.floats(0, 10)), min_size=1, max_size=30
)


@quick
@given(requests, st.floats(0, 80), st.sampled_from([5.0, 60.0]))
def test_the_lane_orders_as_the_bands_say(
    drawn: list[tuple[int, float | None, float]], now: float, max_wait: float
) -> None:
    items = [waiting(str(n), p, ttft=ttft, arrived_at=at, number=n) for n, (p, ttft, at) in enumerate(drawn)]
    lane = lane_of(*items, max_wait_seconds=max_wait)
    left = {item.request.id: item for item in items}
    while lane:
        head = lane.head(now, PACE)
        ranks = {
            name: urgency(w, w.request.prompt_tokens, w.key, now, pace=PACE, max_wait_seconds=max_wait)
            for name, w in left.items()
        }
        if any(band is Band.HOPELESS for band, _ in ranks.values()):
            ranks = {
                name: (Band.ORDINARY, left[name].key) if band is Band.URGENT else (band, key)
                for name, (band, key) in ranks.items()
            }
        assert ranks[head.request.id] == min(ranks.values())
        lane.remove(head)
        del left[head.request.id]


@quick
@given(requests, st.lists(st.floats(0, 3), min_size=1, max_size=30))
def test_nobody_in_a_lane_waits_longer_than_the_bound_behind_younger_ones(
    drawn: list[tuple[int, float | None, float]], pauses: list[float]
) -> None:
    """Whatever deadlines others have: after ``max_wait`` only older ones go before."""
    items = [waiting(str(n), p, ttft=ttft, arrived_at=at, number=n) for n, (p, ttft, at) in enumerate(drawn)]
    lane, now = lane_of(*items, max_wait_seconds=5.0), 0.0
    left = set(items)
    for pause in pauses:
        now += pause
        if not lane:
            break
        head = lane.head(now, PACE)
        overdue = [w for w in left if now - w.arrived_at >= 5.0]
        if overdue:
            assert head == min(overdue, key=lambda w: (w.arrived_at, w.number))
        lane.remove(head)
        left.remove(head)
