"""The command line of ``slai-proxy simulate``: what may be asked for, and the help that explains it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from proxy.sim.argtypes import count, list_of, none_or_more, not_negative, positive, share, told, whole
from proxy.sim.engine import EngineConfig
from proxy.sim.parallel import usable_cores
from proxy.sim.policies import POLICIES, PolicyOptions, find_policy, read_replicas
from proxy.sim.profiles import PROFILES, checked_profile
from proxy.sim.quotas import parse_tokens
from proxy.sim.simulator import SimulationConfig
from proxy.sim.workload import SHAREGPT_LIKE, parse_class, parse_surge, parse_tenants

if TYPE_CHECKING:
    import argparse

_LISTED = "\n".join(f"  {policy.name:<17} {policy.summary}" for policy in POLICIES.values())

DESCRIPTION = """\
Compare scheduling policies on simulated vLLM engines. The proxy's part is played by the very scheduler that the live
proxy runs; time is virtual, so hours of traffic take seconds. One seed gives every policy the same requests at the
same instants; compare several seeds before you believe a difference, and 1,000 requests or more near saturation."""

EPILOG = f"""\
policies:
{_LISTED}

examples:
  does the proxy help at 1.7 requests per second on one RTX 6000 Ada?
    slai-proxy simulate --policy fcfs,gate --rate 1.7 --requests 2000 --seeds 1,2,3

  what is the capacity at a median TTFT of half a second, and how much of it takes a change of the engine?
    slai-proxy simulate --policy fcfs,fcfs-watermark,gate,slai,tiles,slai-engine --rate 1.1,1.3,1.5,1.7,1.9 \\
        --capacity 0.5

  two H100s under the lengths of your own traffic, from light load to overload, figures to a file
    slai-proxy simulate --profile h100 --engines 2 --token-budget 2048 --max-num-seqs 256 --trace traffic.csv \\
        --policy fcfs,gate --rate 4,8,12,16 --requests 2000 --seeds 1,2,3 --json > study.json

  four replicas of the proxy before four engines: as one fleet, and each by itself, measured by a single proxy
    slai-proxy simulate --policy gate --replicas 1,4,4-apart --engines 4 --rate 6.8

exit status: 0 fine; 1 a worker process was lost; 2 wrong usage; 130 interrupted (what is complete is printed)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options to ``parser``."""
    _add_comparison(parser.add_argument_group("what to compare, on which requests"))
    _add_engines(parser.add_argument_group("engines (the flags of vllm serve, where it has them)"))
    _add_proxy(parser.add_argument_group("proxy"))
    group = parser.add_argument_group("how")
    group.add_argument(
        "--capacity",
        type=positive,
        metavar="SECONDS",
        help="also tell between which of the rates each policy ceases to keep the median TTFT within SECONDS and the "
        "p99 TBT of each class within its deadline",
    )
    group.add_argument(
        "--step-model",
        action="store_true",
        help="do not compare: tell how well the proxy has learnt the engine's step times after 10, 100, 500, 2,000 "
        "and 10,000 steps, in a run of each policy that has a proxy (use it with --jitter)",
    )
    group.add_argument(
        "--jobs", type=count, default=usable_cores(), metavar="N", help="processes (default: one for each core)"
    )
    group.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="write all that the proxy is told and decides, for slai-proxy replay; for one policy, rate and seed",
    )
    group.add_argument(
        "--json", action="store_true", help="write all figures to standard output as JSON; tables then go to stderr"
    )


def _replicas(text: str) -> str:
    count, apart = read_replicas(text)
    return f"{count}-apart" if apart else str(count)


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        type=list_of(lambda name: find_policy(name).name),
        default=["fcfs", "gate"],
        metavar="NAME[,NAME]",
        help="policies, also your own as MODULE:NAME (docs/policies.md); the first is what the others are measured by "
        "(default: fcfs,gate)",
    )
    group.add_argument(
        "--rate",
        required=True,
        type=list_of(positive),
        metavar="R[,R]",
        help="requests per second over all engines, Poisson; several make several comparisons",
    )
    group.add_argument(
        "--surge",
        type=told(parse_surge),
        metavar="FACTOR:SECONDS",
        help="for the first SECONDS, FACTOR times as many requests come as --rate says",
    )
    group.add_argument("--requests", type=count, default=2000, metavar="N", help="requests in a run (default: 2000)")
    group.add_argument(
        "--seeds",
        type=list_of(whole),
        default=[1, 2, 3],
        metavar="N[,N]",
        help="seeds, a run each; figures are medians over them (default: 1,2,3)",
    )
    group.add_argument(
        "--trace",
        default=SHAREGPT_LIKE,
        metavar="FILE",
        help=f"lengths of prompts and outputs: a CSV or ShareGPT JSON file, or {SHAREGPT_LIKE!r}, the built-in default",
    )
    group.add_argument(
        "--class",
        dest="classes",
        action="append",
        type=told(parse_class),
        metavar="NAME:SHARE[:tbt=S][:ttft=S][:weight=W]",
        help="a class of users, its share of the requests and its deadlines in seconds; repeat for each class "
        "(default: strict:0.05:tbt=0.1 and relaxed:0.95:tbt=0.5)",
    )
    group.add_argument(
        "--retries",
        type=none_or_more,
        default=0,
        metavar="N",
        help="how often a client that was refused comes back, when it was told to (default: 0)",
    )
    group.add_argument(
        "--tenants",
        type=told(parse_tenants),
        metavar="NAME=PART[,..]",
        help="tenants and their parts of the rate, e.g. calm=1,flood=10; the proxy gives them equal shares",
    )


def _add_engines(group: argparse._ArgumentGroup) -> None:
    standard = EngineConfig()
    group.add_argument(
        "--profile",
        type=told(checked_profile),
        default=standard.profile.name,
        metavar="NAME|FILE",
        help=f"GPU, with Mistral-7B in 16 bits on it: {', '.join(PROFILES)}; or a file that slai-proxy calibrate has "
        f"written of your own engine (default: {standard.profile.name})",
    )
    group.add_argument("--engines", type=count, default=1, metavar="N", help="how many of them (default: 1)")
    group.add_argument(
        "--token-budget",
        type=count,
        default=standard.token_budget,
        metavar="N",
        help=f"tokens in a step, --max-num-batched-tokens (default: {standard.token_budget}, the largest power of two "
        "that holds 100 ms between tokens on an RTX 6000 Ada)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=count,
        default=standard.max_num_seqs,
        metavar="N",
        help=f"sequences in a step (default: {standard.max_num_seqs})",
    )
    group.add_argument(
        "--tile",
        type=count,
        default=standard.profile.step.tile,
        metavar="N",
        help="what a step costs is that of its tokens rounded up to a multiple of N, as of a GPU that multiplies whole "
        "tiles, e.g. 128 (default: 1)",
    )
    group.add_argument(
        "--async-scheduling",
        action="store_true",
        help="the engines compose each step while the one before it runs, vLLM's default on GPUs: a prompt waits a "
        "step longer, and tiles have to be sent a step ahead (default: off, as in the paper)",
    )
    group.add_argument(
        "--watermark",
        type=share,
        default=standard.watermark,
        metavar="SHARE",
        help=f"share of the KV cache that the engine's own admission leaves free (default: {standard.watermark:g})",
    )
    group.add_argument(
        "--jitter",
        action="store_true",
        help="steps take 0.7 ms longer on average (exponentially distributed), and 1 %% of them 5 to 30 ms more",
    )
    group.add_argument(
        "--network-ms",
        type=not_negative,
        default=1e3 * SimulationConfig().network_seconds,
        metavar="MS",
        help="one-way delay in milliseconds between an engine and the proxy, or the clients without one (default: 1)",
    )


def _add_proxy(group: argparse._ArgumentGroup) -> None:
    standard = PolicyOptions()
    group.add_argument(
        "--replicas",
        type=list_of(told(_replicas)),
        default=["1"],
        metavar="N[,N]",
        help="run every policy that has a proxy with so many replicas of it, to which requests come in turn: a fleet "
        "that shares one queue (docs/fleet.md), or with N-apart, replicas that know nothing of each other "
        "(default: 1)",
    )
    group.add_argument(
        "--message-ms",
        type=not_negative,
        default=1e3 * SimulationConfig().message_seconds,
        metavar="MS",
        help="one-way delay in milliseconds between two replicas, through the store (default: 1)",
    )
    group.add_argument(
        "--backlog-factor",
        type=positive,
        default=standard.backlog_factor,
        metavar="F",
        help="release prompts while an engine has less than F steps of them before it: less orders more prompts, more "
        f"keeps the engine busier (default: {standard.backlog_factor:g})",
    )
    group.add_argument(
        "--aging-seconds",
        type=positive,
        default=standard.aging_seconds,
        metavar="S",
        help="a waiting prompt counts half as long with every S seconds: less is fairer to long prompts "
        f"(default: {standard.aging_seconds:g})",
    )
    group.add_argument(
        "--tenant-headroom",
        type=share,
        default=standard.tenant_headroom,
        metavar="H",
        help="share of an engine that a tenant with a queue leaves free while others have none: more is a shorter TTFT "
        f"for those and less throughput (with --tenants; default: {standard.tenant_headroom:g})",
    )
    group.add_argument(
        "--guarantee",
        type=told(parse_tokens),
        default={},
        metavar="NAME=TOKENS[,..]",
        help="tokens a minute, prompt and output, up to which a tenant's work goes before what is beyond others' and "
        "leaves nothing free",
    )
    group.add_argument(
        "--quota",
        type=told(parse_tokens),
        default={},
        metavar="NAME=TOKENS[,..]",
        help="tokens a minute, prompt and output, that a tenant's API key may use: what is beyond is refused at once",
    )
