import pytest

from proxy.sim.policies import POLICIES, PolicyOptions, find_policy


def test_fcfs_does_without_a_proxy() -> None:
    assert find_policy("fcfs").scheduler(PolicyOptions()) is None


def test_gate_takes_its_options_to_the_scheduler() -> None:
    config = find_policy("gate").scheduler(PolicyOptions(backlog_factor=2.0, aging_seconds=1.0, feedback_seconds=0.03))
    assert config is not None
    assert config.gate.backlog_factor == 2.0
    assert config.gate.feedback_seconds == 0.03
    # Ten seconds halve a prompt ten times: 1,000 tokens count for less than 2 that have just come.
    assert config.ordering(1000, 0.0) < config.ordering(2, 10.0)


def test_gate_prefers_the_short_prompt_and_gate_fcfs_the_early_one() -> None:
    early_and_long, late_and_short = (4000, 0.0), (10, 0.5)
    orderings = {}
    for name in ("gate", "gate-fcfs"):
        config = find_policy(name).scheduler(PolicyOptions())
        assert config is not None
        orderings[name] = config.ordering
    assert orderings["gate"](*late_and_short) < orderings["gate"](*early_and_long)
    assert orderings["gate-fcfs"](*early_and_long) < orderings["gate-fcfs"](*late_and_short)


def test_unknown_policy_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'spf'; there are fcfs, gate, tiles, fcfs-large, gate-fcfs"):
        find_policy("spf")


def test_every_policy_says_what_it_is() -> None:
    assert all(name == policy.name and policy.summary for name, policy in POLICIES.items())
