"""What a simulation can compare, by name: the proxy's policies, and engines left to themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from proxy.core.admission import GateConfig
from proxy.core.config import SchedulerConfig
from proxy.core.ordering import AGING_SECONDS
from proxy.core.policies import PolicyName, configure
from proxy.core.tiles import TileConfig
from proxy.sim.custom import as_ordering, is_engine_scheduler, load, proxy_with
from proxy.sim.schedulers import EngineSchedulerName, plugin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.simulator import SimulationConfig


_GATE = GateConfig()


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What can be turned on a policy; one that has no use for an option ignores it."""

    backlog_factor: float = _GATE.backlog_factor
    aging_seconds: float = AGING_SECONDS
    """A waiting prompt counts half as long with every such time."""
    feedback_seconds: float = _GATE.feedback_seconds
    tenant_headroom: float = _GATE.tenant_headroom
    guarantees: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Tokens a minute, by tenant."""

    def gate(self) -> GateConfig:
        return GateConfig(
            backlog_factor=self.backlog_factor,
            feedback_seconds=self.feedback_seconds,
            tenant_headroom=self.tenant_headroom,
        )


def _proxy(policy: PolicyName, options: PolicyOptions, tiles: TileConfig | None = None) -> SchedulerConfig:
    config = SchedulerConfig(gate=options.gate(), tiles=tiles, tenant_guarantees=options.guarantees)
    return configure(policy, config, options.aging_seconds)


def _direct(_: PolicyOptions) -> None:
    """No proxy at all."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A named policy. ``scheduler`` makes the proxy's settings; ``None`` from it means that there is no proxy."""

    name: str
    summary: str
    scheduler: Callable[[PolicyOptions], SchedulerConfig | None]
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``EngineConfig`` in which its engines differ from those of the rest of the study."""
    hold_above: int | None = None
    """Without a scheduler: requests are held, in order of arrival, while every engine queues more than this."""
    disaggregated: bool = False
    """Whether half of the engines do nothing but prefill, and the others nothing but decode."""
    limits_ttft: bool = False
    """Whether a class's TTFT deadline is a limit as well: who cannot meet it is refused."""
    replicas: int = 1
    """Of the proxy."""
    apart: bool = False
    """Whether these know nothing of each other."""

    def simulation(self, config: SimulationConfig, seed: int) -> SimulationConfig:
        """Return ``config`` as this policy wants it."""
        engine = replace(config.engine, **self.engine)
        if self.disaggregated and config.engines < 2:
            raise ValueError(f"--policy {self.name} needs two engines or more (--engines 2)")
        prefill_engines = config.engines // 2 if self.disaggregated else 0
        return replace(
            config,
            engine=engine,
            seed=seed,
            hold_above=self.hold_above,
            prefill_engines=prefill_engines,
            replicas=self.replicas,
            apart=self.apart,
        )


_TILES_BUDGET = 8192
"""More than any tile: the proxy sizes the steps, not the engine."""
_WATERMARK = 0.03

_Name = EngineSchedulerName
_IN_ENGINE: tuple[tuple[str, EngineSchedulerName, str, dict[str, Any]], ...] = (
    ("vllm-priority", _Name.VLLM_PRIORITY, "vLLM's --scheduling-policy priority: tight TBT deadlines first", {}),
    ("sarathi", _Name.SARATHI, "Sarathi-Serve's scheduler: chunked prefill, all decodes first", {}),
    ("sarathi-spf", _Name.SARATHI_SPF, "the same, the shortest prompt first", {}),
    ("sarathi-priority", _Name.SARATHI_PRIORITY, "the same, users with tight TBT deadlines before the others", {}),
    ("srpf", _Name.SRPF, "the same, the shortest remaining prompt first: a long one half-way blocks no short one", {}),
    ("orca", _Name.ORCA, "Orca's scheduler: whole prompts, 8 sequences as in the SLAI paper", {"max_num_seqs": 8}),
    ("slai-fixed", _Name.SLAI_FIXED, "SLAI, with a fixed offset", {}),
    ("slai-fcfs", _Name.SLAI_FCFS, "SLAI, with a fixed offset and in order of arrival", {}),
    ("slai-priority", _Name.SLAI_PRIORITY, "SLAI, users with tight TBT deadlines before the others", {}),
    ("slai-as-published", _Name.SLAI_AS_PUBLISHED, "SLAI, with the late first deadlines of the published code", {}),
    ("slai-mended", _Name.SLAI_MENDED, "SLAI without the quirks of the published code", {}),
    ("rad-engine", _Name.RAD, "the paper's RAD (Algorithm 1): throughput, and no thought of latency", {}),
    (
        "deadline",
        _Name.DEADLINE,
        "our scheduler: shortest remaining first, steps as long as TBT deadlines allow, streams with time wait",
        {"token_budget": 2048},
    ),
    (
        "plugin-deadline",
        _Name.PLUGIN_DEADLINE,
        "vLLM's scheduler and our plugin in it, with its policy deadline: what the plugin can be expected to do",
        {"token_budget": 2048},
    ),
    ("plugin-slai", _Name.PLUGIN_SLAI, "the same, with the plugin's policy slai", {}),
    ("plugin-rad", _Name.PLUGIN_RAD, "the same, with the plugin's policy rad", {}),
)
"""Name, scheduler, what it is, and fields of ``EngineConfig`` that go with it."""

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs", "no proxy: straight to the engines, in turn if there are several", _direct),
        Policy(
            "fcfs-watermark",
            f"no proxy, and engines with --watermark {_WATERMARK}: what the proxy's KV rule alone would bring",
            _direct,
            {"watermark": _WATERMARK},
        ),
        Policy("gate", f"the proxy with --policy spf: {PolicyName.SPF.summary}", partial(_proxy, PolicyName.SPF)),
        Policy("slai", f"the proxy with --policy slai: {PolicyName.SLAI.summary}", partial(_proxy, PolicyName.SLAI)),
        Policy("rad", f"the proxy with --policy rad: {PolicyName.RAD.summary}", partial(_proxy, PolicyName.RAD)),
        Policy(
            "gate-fcfs",
            "the proxy with --policy fcfs: shows what holding prompts back costs by itself",
            partial(_proxy, PolicyName.FCFS),
        ),
        Policy(
            "tiles",
            f"the proxy sends prompts ahead in tiles, one per step (engine budget {_TILES_BUDGET}; experimental)",
            partial(_proxy, PolicyName.SPF, tiles=TileConfig()),
            {"token_budget": _TILES_BUDGET},
        ),
        *(
            Policy(
                f"gate-{name}",
                f"the proxy with --policy spf over {summary}",
                partial(_proxy, PolicyName.SPF),
                {"scheduler": scheduler, **engine},
            )
            for name, scheduler, summary, engine in _IN_ENGINE
            if plugin_of(scheduler) is not None
        ),
        Policy(
            "fcfs-large",
            f"no proxy over engines as tiles has them (budget {_TILES_BUDGET}): what such steps do to streams",
            _direct,
            {"token_budget": _TILES_BUDGET},
        ),
        Policy(
            "slai-engine",
            "no proxy over engines with the SLAI paper's scheduler in them: what takes a change of the engine",
            _direct,
            {"scheduler": EngineSchedulerName.SLAI},
        ),
        *(
            Policy(name, f"no proxy over engines with {summary}", _direct, {"scheduler": scheduler, **engine})
            for name, scheduler, summary, engine in _IN_ENGINE
        ),
        Policy(
            "disaggregated",
            "no proxy; half of the engines only prefill, the others only decode, and KV cache moves between them",
            _direct,
            disaggregated=True,
        ),
        Policy(
            "gate-limit",
            "the gate, which refuses at once who would miss the TTFT deadline of its class (see --class)",
            partial(_proxy, PolicyName.SPF),
            limits_ttft=True,
        ),
        Policy(
            "hold3",
            "what other proxies do: hold requests, first come first served, while engines queue more than three",
            _direct,
            hold_above=3,
        ),
    )
}


def find_policy(name: str) -> Policy:
    """Return the policy of that name, or what ``module:attribute`` names; see ``proxy.sim.custom``.

    ``NAME@4``: with four replicas of the proxy; ``NAME@4-apart``: which know nothing of each other.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    base, at, replicas = name.rpartition("@")
    if at:
        return _replicated(find_policy(base), replicas)
    if ":" in name:
        return _custom(name)
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}") from None


def read_replicas(text: str) -> tuple[int, bool]:
    """Return how many replicas ``4`` or ``4-apart`` are, and whether they know nothing of each other.

    Raises:
        ValueError: it is neither.
    """
    count, dash, apart = text.partition("-")
    if not (count.isdecimal() and 1 <= int(count) <= _MOST_REPLICAS) or (dash and apart != "apart"):
        raise ValueError(f"{text!r} is no number of replicas from 1 to {_MOST_REPLICAS}, such as 4 or 4-apart")
    return int(count), bool(dash)


_MOST_REPLICAS = 64


def _replicated(policy: Policy, text: str) -> Policy:
    replicas, apart = read_replicas(text)
    if policy.scheduler(PolicyOptions()) is None:
        raise ValueError(f"--policy {policy.name} has no proxy that could have replicas")
    return replace(policy, name=f"{policy.name}@{text}", replicas=replicas, apart=apart)


@cache
def _custom(spec: str) -> Policy:
    found = load(spec)
    if isinstance(found, Policy):
        return replace(found, name=spec)
    if is_engine_scheduler(found):
        return Policy(spec, "no proxy over engines with a scheduler of yours", _direct, {"scheduler": found})
    return Policy(spec, "the proxy with an order of yours", partial(proxy_with, as_ordering(spec, found)))
