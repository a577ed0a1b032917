"""Simulated servers in virtual time, for ``--simulate``: the same commands and reports, and no server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.sim.engine import EngineConfig
from proxy.sim.policies import PolicyOptions, find_policy
from proxy.sim.profiles import Jitter, find_profile
from proxy.sim.simulator import SimulationConfig, limits_of, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.records import RequestRecord
    from proxy.sim.workload import ScheduledRequest


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """Engines with or without a proxy in front of them. It may go to another process."""

    policy: str = "fcfs"
    """By name; see ``slai-proxy simulate --help``."""
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    options: PolicyOptions = field(default_factory=PolicyOptions)

    def __post_init__(self) -> None:
        find_policy(self.policy)  # a wrong name is told at once

    def serve(self, workload: Sequence[ScheduledRequest], seed: int = 0) -> list[RequestRecord]:
        """Serve all of ``workload`` in virtual time; ``seed`` is that of the engines' jitter, if they have any."""
        policy = find_policy(self.policy)
        return simulate(workload, policy.simulation(self.simulation, seed), policy.scheduler(self.options)).records

    def check(self, workload: Sequence[ScheduledRequest]) -> None:
        """Make sure that it can serve such requests.

        Raises:
            ValueError: one is longer than the KV cache, waits for another's answer, or has blocks to share.
        """
        if any(r.after is not None for r in workload):
            raise ValueError("--simulate knows no sessions and no closed loop; leave --turns and --concurrency out")
        if any(r.blocks for r in workload):
            # Left out silently, every prompt would be computed whole, and the servers look slower than they are.
            raise ValueError(
                "--simulate knows none of the blocks that this trace names: add --no-sharing, or send it to "
                "slai-proxy engine, whose prefix cache finds them"
            )
        room = limits_of(self.simulation.engine).kv_tokens or 0
        longest = max(r.prompt_tokens + r.output_tokens for r in workload)
        if longest > room:
            raise ValueError(f"a request of {longest:,} tokens can never fit the simulated KV cache of {room:,}")

    def describe(self) -> dict[str, Any]:
        """For a report's ``config``: all that it takes to have the same servers again."""
        engine = self.simulation.engine
        return {
            "profile": engine.profile.name,
            "policy": self.policy,
            "engines": self.simulation.engines,
            "token_budget": engine.token_budget,
            "max_num_seqs": engine.max_num_seqs,
            "watermark": engine.watermark,
            "async_scheduling": engine.async_scheduling,
            "jitter": engine.jitter is not None,
            "network_s": self.simulation.network_seconds,
        }


def simulated_servers(
    profile: str,
    policies: Sequence[str],
    *,
    engines: int = 1,
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    network_seconds: float | None = None,
    jitter: bool = False,
    async_scheduling: bool = False,
) -> list[SimulatedServer]:
    """Make one for each policy; what is ``None`` is as in ``slai-proxy simulate``.

    Raises:
        ValueError: an unknown profile or policy.
    """
    try:
        found = find_profile(profile)
    except ValueError as error:
        raise ValueError(f"--simulate: {error}") from None
    standard = EngineConfig()
    engine = EngineConfig(
        found,
        token_budget or standard.token_budget,
        max_num_seqs or standard.max_num_seqs,
        async_scheduling=async_scheduling,
        jitter=Jitter() if jitter else None,
    )
    network = SimulationConfig().network_seconds if network_seconds is None else network_seconds
    simulation = SimulationConfig(engine, engines, network)
    options = PolicyOptions(feedback_seconds=max(PolicyOptions().feedback_seconds, 2 * network))
    return [SimulatedServer(policy, simulation, options) for policy in policies]
