"""The command: which proxy, which cases, and what to write."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance import report
from conformance.catalogue import all_cases
from conformance.proxies import Proxy, ProxyError, at, claims_of, known_proxies, put_through, version_of
from conformance.suite import Result, Verdict, lab, run_all

_CLAIMS = """what the proxy says it is (--claims), as cases ask for it:
  relay     it passes bodies and headers as they come
  paths     it passes every path and method, also those that it does not know
  websocket it passes WebSockets
  llm       it knows the OpenAI API: shape of errors, error event on a stream that breaks off
  retry     it sends elsewhere what an engine has provably not started
  limit     started by its second command, it lets two requests at each engine and four in its queue
  slai      it is slai-proxy"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    names = ", ".join(known_proxies())
    parser = argparse.ArgumentParser(
        "python -m conformance",
        description="Put a proxy for LLM engines through the cases of README.md. The suite runs the engines itself.",
        epilog=_CLAIMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--proxy", metavar="NAME", help=f"one of proxies.toml: {names} (default: slai-proxy)")
    what.add_argument(
        "--proxy-command",
        metavar="COMMAND",
        help="start this, with {port}, {upstreams} or {upstreams_csv}: 'myproxy --listen {port} --to {upstreams_csv}'",
    )
    what.add_argument("--proxy-url", metavar="URL", help="one that runs already; give the engines' ports by --ports")
    what.add_argument("--list", action="store_true", help="print the table of cases as Markdown and end")
    what.add_argument("--tables", nargs="+", metavar="FILE", help="print Markdown tables of --json files and end")
    parser.add_argument("--claims", help="comma-separated; by default those of proxies.toml, or relay,paths,llm")
    parser.add_argument("--ports", help="ports that the two engines listen on, like 18001,18002 (default: free ones)")
    parser.add_argument("--ready", default="/v1/models", help="path that answers 200 once a --proxy-command is ready")
    parser.add_argument("--model", default="m", help="the engines' model (default: m)")
    parser.add_argument("--key", default="sk-conformance", help="API key that clients send")
    parser.add_argument("--venvs", default="venvs", help="folder of the virtual environments that proxies.toml names")
    parser.add_argument("--only", help="run only cases whose id or area has this in it")
    parser.add_argument("--at-once", type=int, default=16, help="cases side by side (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser.parse_args(argv)


async def run(options: argparse.Namespace) -> int:
    known = known_proxies()
    name = options.proxy or "slai-proxy"
    if name not in known:
        print(f"there is no proxy {name!r} in proxies.toml; known: {', '.join(known)}", file=sys.stderr)
        return 2
    proxy = known[name]
    if options.proxy_command:
        proxy = Proxy("proxy", options.proxy_command, claims_of(["relay", "paths", "llm"]), options.ready)
    elif options.proxy_url:
        proxy = Proxy(options.proxy_url, "", claims_of(["relay", "paths", "llm"]))
    try:
        claims = claims_of(options.claims.split(",")) if options.claims else proxy.claims
    except ValueError as error:
        print(f"--claims: {error}\n{_CLAIMS}", file=sys.stderr)
        return 2
    ports = [int(port) for port in options.ports.split(",")] if options.ports else [0, 0]
    cases = [case for case in all_cases() if not options.only or options.only in f"{case.id} {case.area}"]

    def tell(verdict: Verdict) -> None:
        print(report.line(verdict), flush=True)

    async with lab(options.model, options.key, ports) as the_lab:
        if options.proxy_url:
            at(the_lab, options.proxy_url)
            verdicts = await run_all(the_lab, cases, claims, at_once=options.at_once, tell=tell)
        else:
            verdicts = await put_through(
                replace(proxy, claims=claims), the_lab, cases, venvs=options.venvs, at_once=options.at_once, tell=tell
            )
    version = await version_of(proxy, options.venvs)
    print(f"\n{proxy.name} {version}: {report.summary(verdicts)}")
    if options.json:
        written = report.dumps(report.as_json(proxy.name, version, verdicts)) + "\n"
        await asyncio.to_thread(options.json.write_text, written, encoding="utf-8")
    return int(any(verdict.result is Result.FAILED for verdict in verdicts))


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.list:
        print(report.table_of_cases(all_cases()))
        return 0
    if options.tables:
        results: list[dict[str, Any]] = [json.loads(Path(name).read_text(encoding="utf-8")) for name in options.tables]
        print(report.table_of_proxies(results), "\n", report.table_of_results(results, all_cases()), sep="\n")
        return 0
    try:
        return asyncio.run(run(options))
    except ProxyError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
