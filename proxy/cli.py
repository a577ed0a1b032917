"""``slai-proxy``: serve, check-config, config, key, simulate, bound, calibrate, engine, replay."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import re
import sys
from typing import TYPE_CHECKING

from proxy import __version__
from proxy.core import is_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COMMANDS = {
    "serve": "start the proxy in front of vLLM servers (or of simulated ones)",
    "check-config": "say whether the settings hold, and start nothing",
    "config": "print the settings as they would hold, and where each comes from",
    "simulate": "compare schedulers in virtual time",
    "bound": "tell how much engines can serve at most, and what binds",
    "calibrate": "measure a live engine and write its profile",
    "engine": "start simulated vLLM servers",
    "replay": "decide anew what a decision log holds, and compare",
}

_WHAT = {
    "serve": "Serve the OpenAI API in front of vLLM servers, or of simulated ones, until SIGTERM or Ctrl-C. Exit "
    "codes: 0, it has ended as told to, also by a second signal; 1, it cannot listen; 2, the settings do not hold.",
    "check-config": "Take the same flags as serve, start nothing, and say whether the settings hold, with all files "
    "that they name. Exit codes: 0, they do; 2, they do not.",
    "config": "Take the same flags as serve, start nothing, and print the settings as they would hold: as YAML, each "
    "beneath where it comes from (flag, environment, file or default). The output can be kept as a file for --config.",
}

_FLAG = re.compile(r"--[a-z][a-z-]*")
_NEGATIVE = re.compile(r"-\.?\d")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # before a command has set up its own way to end
        return 130


def _with_negative_values(arguments: Sequence[str]) -> list[str]:
    """Write ``--flag -2:10`` as ``--flag=-2:10``: argparse takes what is no plain number for a flag of its own."""
    joined: list[str] = []
    for argument in arguments:
        if _NEGATIVE.match(argument) and joined and _FLAG.fullmatch(joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and (command := _OF_SETTINGS.get(arguments[0])) is not None:  # their flags are the settings
        return command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="slai-proxy",
        description="A scheduling reverse proxy for LLM inference. 'slai-proxy COMMAND --help' tells more.",
    )
    compiled = " (core compiled)" if is_compiled() else ""
    parser.add_argument("--version", action="version", version=f"slai-proxy {__version__}{compiled}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _OF_SETTINGS:
        commands.add_parser(name, help=_COMMANDS[name])
    from proxy import key_command as key  # noqa: PLC0415
    from proxy.sim import bound_command as bound  # noqa: PLC0415
    from proxy.sim import calibrate_command as calibrate  # noqa: PLC0415
    from proxy.sim import command as simulate  # noqa: PLC0415 - numpy and rich are not for serving
    from proxy.sim.http import command as engine  # noqa: PLC0415
    from proxy.telemetry import replay_command as replay  # noqa: PLC0415

    key.add_parser(commands)
    simulate.add_parser(commands)
    bound.add_parser(commands)
    calibrate.add_parser(commands)
    engine.add_parser(commands)
    replay.add_parser(commands)
    options = parser.parse_args(_with_negative_values(arguments))
    modules = {
        "key": key,
        "simulate": simulate,
        "bound": bound,
        "calibrate": calibrate,
        "engine": engine,
        "replay": replay,
    }
    status: int = modules[options.command].run(options)
    return status


def _serve(arguments: Sequence[str]) -> int:
    from proxy.configfile import ConfigError  # noqa: PLC0415
    from proxy.configload import advice, load_settings  # noqa: PLC0415
    from proxy.server.run import serve  # noqa: PLC0415
    from proxy.server.workers import Place, Supervisor  # noqa: PLC0415
    from proxy.telemetry.decisionlog import DecisionLogError  # noqa: PLC0415
    from proxy.telemetry.logs import set_up_logging  # noqa: PLC0415
    from proxy.telemetry.otlp import TelemetryUnavailableError  # noqa: PLC0415
    from proxy.upstream.knowledge import StateDirError  # noqa: PLC0415

    try:
        settings, sources = load_settings(arguments, "slai-proxy serve", _WHAT["serve"])
        set_up_logging(settings.log_level)
        is_worker = Place.from_environment(os.environ) is not None
        for line in () if is_worker else advice(settings, sources):  # those of several have been told once
            print(f"slai-proxy: {line}", file=sys.stderr)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            if settings.workers > 1 and not is_worker:
                return runner.run(Supervisor(settings, arguments).run())
            runner.run(serve(settings, lambda: load_settings(arguments, "slai-proxy serve")[0]))
    except (ConfigError, DecisionLogError, StateDirError, TelemetryUnavailableError) as error:
        print(f"slai-proxy: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # The debug port's error names its address.
        address, flag = (
            (error.filename, "--debug-port") if error.filename else (f"{settings.host}:{settings.port}", "--port")
        )
        hint = f"; choose another {flag}" if error.errno == errno.EADDRINUSE else ""
        print(f"slai-proxy: cannot listen on {address}: {error.strerror}{hint}", file=sys.stderr)
        return 1
    return 0


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.Loop


def _show_config(arguments: Sequence[str]) -> int:
    import yaml  # noqa: PLC0415

    from proxy.configfile import ConfigError  # noqa: PLC0415
    from proxy.configload import advice, load_settings  # noqa: PLC0415

    try:
        settings, sources = load_settings(arguments, "slai-proxy config", _WHAT["config"])
    except ConfigError as error:
        print(f"slai-proxy: {error}", file=sys.stderr)
        return 2
    for line in advice(settings, sources):
        print(f"slai-proxy: {line}", file=sys.stderr)
    # Valid YAML, so that it can be kept as a configuration file.
    settings_with_sources = settings.model_dump(mode="json", exclude={"config"}).items()
    print(
        "".join(f"# {sources[n]}\n{yaml.safe_dump({n: v}, sort_keys=False)}" for n, v in settings_with_sources), end=""
    )
    return 0


def _check_config(arguments: Sequence[str]) -> int:
    from proxy.configfile import ConfigError  # noqa: PLC0415
    from proxy.configload import advice, load_settings  # noqa: PLC0415
    from proxy.server.run import check  # noqa: PLC0415

    try:
        settings, sources = load_settings(arguments, "slai-proxy check-config", _WHAT["check-config"])
        check(settings)
    except ConfigError as error:
        print(f"slai-proxy: {error}", file=sys.stderr)
        return 2
    for line in advice(settings, sources):
        print(f"slai-proxy: {line}", file=sys.stderr)
    if not settings.engines:
        print("slai-proxy: no engines are given: serve would start simulated ones", file=sys.stderr)
    print("the settings hold")
    return 0


_OF_SETTINGS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "check-config": _check_config,
    "config": _show_config,
}
