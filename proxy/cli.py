"""``slai-proxy``: serve, simulate, engine, config."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from proxy import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {
    "serve": "start the proxy in front of vLLM servers (or of simulated ones)",
    "config": "print the settings as they would hold, and where each comes from",
    "simulate": "compare schedulers in virtual time",
    "engine": "start simulated vLLM servers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("serve", "config"):  # their flags are the settings
        return _serve(arguments[1:]) if arguments[0] == "serve" else _show_config(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="slai-proxy",
        description="A scheduling reverse proxy for LLM inference. 'slai-proxy COMMAND --help' tells more.",
    )
    parser.add_argument("--version", action="version", version=f"slai-proxy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in ("serve", "config"):
        commands.add_parser(name, help=_COMMANDS[name])
    from proxy.sim import command as simulate  # noqa: PLC0415 - numpy and rich are not for serving
    from proxy.sim.http import command as engine  # noqa: PLC0415

    simulate.add_parser(commands)
    engine.add_parser(commands)
    options = parser.parse_args(arguments)
    run = {"simulate": simulate.run, "engine": engine.run}[options.command]
    return run(options)


def _serve(arguments: Sequence[str]) -> int:
    from proxy.config import ConfigError, load_settings  # noqa: PLC0415
    from proxy.server.run import serve  # noqa: PLC0415
    from proxy.telemetry.tracing import TracingUnavailableError  # noqa: PLC0415

    try:
        settings, _ = load_settings(arguments, "slai-proxy serve")
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
        )
        for library in ("httpx", "httpcore"):  # a line for every probe
            logging.getLogger(library).setLevel(logging.WARNING)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings))
    except (ConfigError, TracingUnavailableError) as error:
        print(f"slai-proxy: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"slai-proxy: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.Loop


def _show_config(arguments: Sequence[str]) -> int:
    from proxy.config import ConfigError, load_settings  # noqa: PLC0415

    try:
        settings, sources = load_settings(arguments, "slai-proxy config")
    except ConfigError as error:
        print(f"slai-proxy: {error}", file=sys.stderr)
        return 2
    values = settings.model_dump(mode="json")
    for name, value in values.items():
        print(f"{name}: {value}  # {sources[name]}")
    return 0
