"""Who is refused before anything is known of the body: nobody who would have been let in with some body."""

from typing import Any

from builders import make_request
from hypothesis import given
from hypothesis import strategies as st
from playbook import Play

from proxy.core.entrance import refused_unread
from proxy.core.request import Request

MODELS = ("", "a", "b", "nobody's")
TENANTS = ("", "one", "other")

bodies = st.fixed_dictionaries(
    {
        "prompt_tokens": st.sampled_from((1, 10, 600, 20_000)),
        "model": st.sampled_from(MODELS),
        "max_tokens": st.sampled_from((None, 1, 5000)),
        "size_bytes": st.sampled_from((0, 100, 10_000)),
        "sequences": st.sampled_from((1, 3)),
    }
)
heads = st.fixed_dictionaries({"tenant": st.sampled_from(TENANTS), "may_wait": st.sampled_from((True, True, False))})
engine_sets = st.sets(st.sampled_from(("a", "b", "any")), min_size=1)
arrivals = st.lists(st.tuples(heads, bodies), min_size=4, max_size=12)
changes = st.lists(st.tuples(st.sampled_from(("end", "end", "down")), st.integers(0, 12)), max_size=3)


def unread(play: Play, head: dict[str, Any]) -> Request | None:
    scheduler = play.scheduler
    smallest = make_request("unread", 1, **head)
    return refused_unread(scheduler.ledger, scheduler.config, smallest, play.now, draining=scheduler.draining)


@given(engine_sets, arrivals, changes, heads, st.lists(bodies, min_size=3, max_size=8))
def test_whoever_is_refused_unread_is_refused_whatever_the_body(
    engines: set[str],
    arrived: list[tuple[dict[str, Any], dict[str, Any]]],
    changed: list[tuple[str, int]],
    head: dict[str, Any],
    tried: list[dict[str, Any]],
) -> None:
    play = Play(engines=(), max_queue_requests=2, max_queue_bytes=20_000)
    for name in sorted(engines):
        play.up(name, models=() if name == "any" else (name,), max_num_seqs=1)
    for number, (its_head, body) in enumerate(arrived):
        play.arrive(f"r{number}", at=number * 0.01, **its_head, **body)
    for what, number in changed:
        if what == "end":
            play.end(f"r{number}")
        else:
            play.down(sorted(engines)[number % len(engines)])
    found = unread(play, head)
    if found is None:
        return
    play.arrive("unread", 1, **head, model=found.model)
    assert [action.request_id for action in play.actions] == ["unread"]
    for number, body in enumerate(tried):
        (answer,) = play.arrive(f"tried{number}", **head, **body)
        assert answer.startswith(f"reject tried{number} ")


def test_who_may_be_let_in_is_read() -> None:
    play = Play(max_num_seqs=1, max_queue_requests=1)
    assert unread(play, {}) is None
    play.arrive("busy")
    assert unread(play, {}) is None
    play.arrive("waits")
    assert unread(play, {}) is not None
    play.end("waits")
    assert unread(play, {}) is None


def test_nobody_is_let_in_without_engines_or_during_a_drain() -> None:
    assert unread(Play(engines=()), {}) is not None
    play = Play()
    play.drain()
    assert unread(play, {}) is not None
