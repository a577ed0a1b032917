"""Starting a proxy in front of the suite's engines, and stopping it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import tomllib
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conformance.suite import Case, Claim, Lab, Verdict, run_all
from conformance.suite import lab as new_lab

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

_TABLE = Path(__file__).parent / "proxies.toml"


class ProxyError(Exception):
    """The proxy cannot be started; the message says why."""


@dataclass(frozen=True)
class Proxy:
    """A proxy, and how to start it."""

    name: str
    command: str
    claims: frozenset[Claim]
    ready: str = "/v1/models"
    version: str = ""
    start_seconds: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    limited: Proxy | None = None
    """How to start it for the cases that need ``Claim.LIMIT``."""


def claims_of(names: list[str]) -> frozenset[Claim]:
    return frozenset({Claim.HTTP, *(Claim(name) for name in names)})


def known_proxies() -> dict[str, Proxy]:
    """Return the proxies of ``proxies.toml`` by their names."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {name: _proxy(name, table) for name, table in tables.items()}


def _proxy(name: str, table: Mapping[str, Any]) -> Proxy:
    limited = table.get("limited")
    return Proxy(
        name,
        table["cmd"],
        claims_of(table["claims"]),
        table.get("ready", "/v1/models"),
        table.get("version", ""),
        float(table.get("start_timeout_s", 30)),
        table.get("env", {}),
        table.get("files", {}),
        None if limited is None else _proxy(name, {**table, "limited": None, **limited}),
    )


async def put_through(
    proxy: Proxy,
    lab: Lab,
    cases: Sequence[Case],
    *,
    venvs: str = "venvs",
    at_once: int = 16,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Start a proxy, and run all cases against it; beside them those that need its limits, on one with its own engines.

    Raises:
        ProxyError: as from ``started``.
    """

    async def put(which: Proxy | None, lab: Lab, chosen: Sequence[Case]) -> list[Verdict]:
        if which is None or not any(case.needs <= proxy.claims for case in chosen):
            return await run_all(lab, chosen, frozenset(), tell=tell)
        async with started(which, lab, venvs):
            return await run_all(lab, chosen, proxy.claims, at_once=at_once, tell=tell)

    plain = [case for case in cases if Claim.LIMIT not in case.needs]
    limited = [case for case in cases if Claim.LIMIT in case.needs]
    try:
        async with new_lab(lab.model, lab.key) as other, asyncio.TaskGroup() as group:
            tasks = [group.create_task(put(proxy, lab, plain)), group.create_task(put(proxy.limited, other, limited))]
    except* ProxyError as errors:
        raise errors.exceptions[0] from None
    verdicts = {verdict.case.id: verdict for task in tasks for verdict in task.result()}
    return [verdicts[case.id] for case in cases]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


async def version_of(proxy: Proxy, venvs: str) -> str:
    """Ask a proxy for its version; empty where it does not tell."""
    if not proxy.version:
        return ""
    command = _fill(proxy.version, {"python": sys.executable, "venvs": venvs})
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError:
        return ""
    output = (await process.communicate())[0].decode(errors="replace")
    found = re.search(r"(?:^Version: |[/ v])(\d+\.\d+[\w.+-]*)", output, re.MULTILINE)
    return found[1] if found else ""


@asynccontextmanager
async def started(proxy: Proxy, lab: Lab, venvs: str = "venvs") -> AsyncIterator[None]:
    """Start ``proxy`` in front of the lab's engines, and point the lab at it.

    Raises:
        ProxyError: it ends at once or is not ready in time; with the end of what it wrote.
    """
    port, port2, port3 = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        values = {
            "port": str(port),
            "port2": str(port2),
            "port3": str(port3),
            "upstreams": " ".join(engine.url for engine in lab.engines),
            "upstreams_csv": ",".join(engine.url for engine in lab.engines),
            "dir": scratch,
            "key": lab.key,
            "model": lab.model,
            "python": sys.executable,
            "venvs": venvs,
        }
        for name, text in proxy.files.items():
            await asyncio.to_thread(Path(scratch, name).write_text, _repeat(text, lab, values), encoding="utf-8")
        log = Path(scratch, "output.log")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLAI_")}
        environment |= {name: _fill(value, values) for name, value in proxy.environment.items()}
        with await asyncio.to_thread(log.open, "wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *shlex.split(_fill(proxy.command, values)),
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ProxyError(f"{proxy.name} cannot be started: {error}") from None
        try:
            await _ready(proxy, process, port, lab.key, log)
            lab.host, lab.port = "127.0.0.1", port
            yield
        finally:
            await _stop(process)


def at(lab: Lab, url: str) -> None:
    """Point the lab at a proxy that runs already."""
    parts = urlsplit(url)
    lab.host, lab.port = parts.hostname or "127.0.0.1", parts.port or 80


async def _ready(proxy: Proxy, process: asyncio.subprocess.Process, port: int, key: str, log: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + proxy.start_seconds
    while loop.time() < deadline and process.returncode is None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                lines = (f"GET {proxy.ready} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Connection: close")
                writer.write("\r\n".join((*lines, "", "")).encode())
                status = (await reader.readuntil(b"\r\n")).split(b" ")[1]
                writer.close()
                if status == b"200":
                    return
        await asyncio.sleep(0.1)
    said = (await asyncio.to_thread(log.read_text, errors="replace"))[-2000:]
    raise ProxyError(f"{proxy.name} was not ready within {proxy.start_seconds:g} s; it wrote:\n{said}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process and what it has started: it leads a session of its own."""
    for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
                break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def _repeat(text: str, lab: Lab, values: Mapping[str, str]) -> str:
    lines = []
    for line in text.splitlines():
        if "{upstream_" in line:
            for number, engine in enumerate(lab.engines):
                own = {
                    "upstream_url": engine.url,
                    "upstream_addr": f"127.0.0.1:{engine.port}",
                    "upstream_n": str(number),
                }
                lines.append(_fill(line, {**values, **own}))
        else:
            lines.append(_fill(line, values))
    return "\n".join(lines) + "\n"
