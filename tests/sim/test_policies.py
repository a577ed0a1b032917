import pytest

from proxy.core.policies import PolicyName
from proxy.sim.engine import EngineConfig
from proxy.sim.policies import POLICIES, PolicyOptions, find_policy
from proxy.sim.schedulers import EngineSchedulerName
from proxy.sim.simulator import SimulationConfig


def test_fcfs_does_without_a_proxy() -> None:
    assert find_policy("fcfs").scheduler(PolicyOptions()) is None


def test_gate_takes_its_options_to_the_scheduler() -> None:
    options = PolicyOptions(backlog_factor=2.0, aging_seconds=1.0, feedback_seconds=0.03, tenant_headroom=0.5)
    config = find_policy("gate").scheduler(options)
    assert config is not None
    assert config.gate.backlog_factor == 2.0
    assert config.gate.feedback_seconds == 0.03
    assert config.gate.tenant_headroom == 0.5
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
    with pytest.raises(ValueError, match="unknown policy 'spf'; there are fcfs, ") as caught:
        find_policy("spf")
    assert all(name in str(caught.value) for name in POLICIES)


def test_every_policy_says_what_it_is() -> None:
    assert all(name == policy.name and policy.summary for name, policy in POLICIES.items())


def test_policies_of_engines_change_those_and_nothing_else() -> None:
    config = SimulationConfig(EngineConfig(max_num_seqs=64), engines=2)
    changed = {name: policy.simulation(config, 7) for name, policy in POLICIES.items()}
    inside = {name for name, c in changed.items() if c.engine.scheduler is not EngineSchedulerName.VLLM}
    alone = {c.engine.scheduler for name, c in changed.items() if POLICIES[name].scheduler(PolicyOptions()) is None}
    assert alone == set(EngineSchedulerName), "each scheduler has a policy"
    plugged = {name for name in inside if POLICIES[name].scheduler(PolicyOptions()) is not None}
    assert plugged == {"gate-plugin-deadline", "gate-plugin-slai", "gate-plugin-rad"}
    assert {name for name, c in changed.items() if c.engine != config.engine} - inside == {
        *("fcfs-watermark", "tiles", "fcfs-large")
    }
    assert changed["fcfs-watermark"].engine.watermark == 0.03
    assert changed["slai-engine"].engine.scheduler is EngineSchedulerName.SLAI
    orca = changed.pop("orca").engine
    assert (orca.scheduler, orca.max_num_seqs) == (EngineSchedulerName.ORCA, 8)
    assert all((c.engine.max_num_seqs, c.engines, c.seed) == (64, 2, 7) for c in changed.values())
    assert {name for name, c in changed.items() if c.prefill_engines} == {"disaggregated"}


def test_disaggregation_needs_two_engines() -> None:
    with pytest.raises(ValueError, match="two engines"):
        find_policy("disaggregated").simulation(SimulationConfig(), 1)


def test_the_proxys_policies_are_all_there() -> None:
    rules = [policy.scheduler(PolicyOptions()) for policy in POLICIES.values()]
    configs = [config for config in rules if config is not None]
    assert any(config.rad is not None for config in configs)
    assert any(config.tiles is not None for config in configs)
    assert sum(f"--policy {name}:" in policy.summary for name in PolicyName for policy in POLICIES.values()) == 4
