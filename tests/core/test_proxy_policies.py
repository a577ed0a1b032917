import pytest

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.policies import PolicyName, configure
from proxy.core.tiles import TileConfig

_BASE = SchedulerConfig(gate=GateConfig(backlog_factor=2.0), max_queue_requests=7)
_EARLY_AND_LONG, _LATE_AND_SHORT = (4000, 0.0), (10, 0.5)


@pytest.mark.parametrize(("policy", "short_first"), [("fcfs", False), ("spf", True), ("slai", True), ("rad", False)])
def test_each_policy_has_its_order(policy: str, short_first: bool) -> None:
    ordering = configure(PolicyName(policy), _BASE, 10.0).ordering
    assert (ordering(*_LATE_AND_SHORT) < ordering(*_EARLY_AND_LONG)) is short_first


def test_aging_halves_a_waiting_prompt() -> None:
    ordering = configure(PolicyName.SPF, _BASE, 1.0).ordering
    # Ten seconds halve a prompt ten times: 1,000 tokens count for less than 2 that have just come.
    assert ordering(1000, 0.0) < ordering(2, 10.0)


@pytest.mark.parametrize("policy", PolicyName)
def test_a_policy_leaves_all_that_is_not_its_own(policy: PolicyName) -> None:
    config = configure(policy, _BASE, 10.0)
    assert config.gate.backlog_factor == 2.0
    assert config.max_queue_requests == 7
    assert policy.summary


def test_only_rad_says_how_full_an_engine_may_be() -> None:
    assert [policy for policy in PolicyName if configure(policy, _BASE, 10.0).rad is not None] == [PolicyName.RAD]


def test_rad_does_not_cut_prompts() -> None:
    with pytest.raises(ValueError, match="tiles"):
        configure(PolicyName.RAD, SchedulerConfig(tiles=TileConfig()), 10.0)
