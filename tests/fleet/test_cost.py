"""What a fleet says to Redis: with requests, and with steps of followers' streams, and with nothing else."""

import pytest
from redis_server import PROGRAM, WHY_NOT

from fleet.cost import queue, traffic


def test_a_leader_releases_as_one_alone_would() -> None:
    assert "10" in queue.measure([10], 1)  # it looks at both queues


@pytest.mark.e2e
@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
async def test_letters_go_with_requests_and_steps_of_a_follower_and_commands_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "tests")  # of the processes that it starts
    found = await traffic.measure([20], 2.0)
    at_leader, at_follower = found.costs
    letters = ("letters of the leader", "letters to the leader")
    assert found.idle["beats"] == pytest.approx(2 * found.replicas, abs=1)
    assert all(found.idle[what] == pytest.approx(2, abs=1) for what in letters)
    for what in letters:
        assert at_leader.request[what] == pytest.approx(0, abs=0.2)
        assert at_leader.token[what] == pytest.approx(0, abs=0.01)
    assert at_follower.request["letters of the leader"] == pytest.approx(1, abs=0.3)  # its release
    assert at_follower.request["letters to the leader"] <= 4  # that it came, began, and is over
    assert at_follower.token["letters of the leader"] == pytest.approx(0, abs=0.01)
    # One for a step of the engine, however many streams take part: here some twenty.
    assert at_follower.token["letters to the leader"] < 0.2
