import argparse
from collections.abc import Callable

import pytest

from proxy.sim.options import EPILOG, add_options
from proxy.sim.parallel import usable_cores
from proxy.sim.policies import POLICIES, PolicyOptions

Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parse() -> Parse:
    parser = argparse.ArgumentParser(prog="simulate")
    add_options(parser)
    return lambda *argv: parser.parse_args(argv)


def test_defaults_are_the_papers_set_up(parse: Parse) -> None:
    args = parse("--rate", "1.7")
    assert vars(args) == {
        "policy": ["fcfs", "gate"],
        "rate": [1.7],
        "requests": 2000,
        "retries": 0,
        "surge": None,
        "seeds": [1, 2, 3],
        "trace": "sharegpt-like",
        "classes": None,
        "tenants": None,
        "guarantee": {},
        "quota": {},
        "profile": "rtx6000ada",
        "engines": 1,
        "token_budget": 512,
        "max_num_seqs": 128,
        "tile": 1,
        "async_scheduling": False,
        "watermark": 0.0,
        "jitter": False,
        "network_ms": 1.0,
        "backlog_factor": PolicyOptions().backlog_factor,
        "aging_seconds": 3.0,
        "tenant_headroom": PolicyOptions().tenant_headroom,
        "replicas": ["1"],
        "message_ms": 1.0,
        "jobs": usable_cores(),
        "capacity": None,
        "step_model": False,
        "json": False,
        "decision_log": None,
    }


def test_lists_and_classes_are_read_in_order(parse: Parse) -> None:
    args = parse("--rate", "0.5, 1.7,1.9", "--seeds", "3,1", "--policy", "gate,fcfs", "--class", "a:1:tbt=0.2")
    assert args.rate == [0.5, 1.7, 1.9]
    assert args.seeds == [3, 1]
    assert args.policy == ["gate", "fcfs"]
    assert [(c.request_class.name, c.request_class.tbt_seconds, c.share) for c in args.classes] == [("a", 0.2, 1.0)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", ""], "the list is empty"),
        (["--rate", "1,,2"], "'1,,2' is not a list such as 1,2,3"),
        (["--rate", "0"], "'0' is not a positive number"),
        (["--rate", "-1.5"], "'-1.5' is not a positive number"),
        (["--rate", "nan"], "'nan' is not a positive number"),
        (["--rate", "inf"], "'inf' is not a positive number"),
        (["--rate", "1,1.0"], "'1,1.0' has the same entry twice"),
        (["--policy", "fcfs,spf"], f"unknown policy 'spf'; there are {', '.join(POLICIES)}"),
        (["--policy", ""], "the list is empty"),
        (["--seeds", "1,x"], "'x' is not a whole number"),
        (["--requests", "0"], "'0' is not a positive whole number"),
        (["--requests", "many"], "'many' is not a positive whole number"),
        (["--engines", "0"], "'0' is not a positive whole number"),
        (["--jobs", "-2"], "'-2' is not a positive whole number"),
        (["--watermark", "1"], "'1' is not a number from 0 to below 1"),
        (["--network-ms", "-1"], "'-1' is not zero or a positive number"),
        (["--aging-seconds", "0"], "'0' is not a positive number"),
        (["--class", "a:2"], "the share lies in (0, 1]"),
        (["--class", "strict"], "a class is NAME:SHARE[:tbt=SECONDS][:ttft=SECONDS][:weight=WEIGHT], not 'strict'"),
        (["--tenants", "a=0"], "tenants are NAME=PART[,NAME=PART]"),
        (["--guarantee", "a"], "what tenants get is NAME=TOKENS[,NAME=TOKENS]"),
        (["--quota", "a=0.5"], "what tenants get is NAME=TOKENS[,NAME=TOKENS]"),
        (["--profile", "gtx"], "no profile 'gtx': there are rtx6000ada, "),
    ],
)
def test_wrong_values_are_told(parse: Parse, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--rate", "1.7", *argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_rate_is_required(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse()
    assert "--rate" in capsys.readouterr().err.splitlines()[-1]


def test_help_explains_every_option_and_every_policy(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert "%(" not in capsys.readouterr().out
    assert all(policy.name in EPILOG and policy.summary in EPILOG for policy in POLICIES.values())


def test_examples_of_the_help_are_valid(parse: Parse) -> None:
    commands = EPILOG.replace("\\\n", " ").splitlines()
    examples = [line.split() for line in commands if line.strip().startswith("slai-proxy simulate")]
    assert len(examples) == 4
    for _, _, *argv in examples:
        assert parse(*argv[: argv.index(">") if ">" in argv else None]).rate
