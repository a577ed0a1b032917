"""What a case is, what it works with, and how cases are run."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scripted_engine import DONE, last, token

from conformance.client import Answer, Connection, request
from conformance.upstream import Script, Scripts, Seen, Upstream

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Claim(StrEnum):
    """What a proxy says it is; cases that ask for more are not put to it."""

    HTTP = "http"
    """An HTTP/1.1 proxy."""
    RELAY = "relay"
    """It passes bodies, headers and paths as they come, and does not translate between APIs."""
    PATHS = "paths"
    """It passes every path and method, also those that it does not know."""
    WEBSOCKET = "websocket"
    """It passes WebSockets."""
    LLM = "llm"
    """It knows the OpenAI API: errors have its shape, and a stream that breaks off ends in an error event."""
    RETRY = "retry"
    """It sends elsewhere what an engine has provably not started."""
    LIMIT = "limit"
    """Started anew by its second command: two requests at each engine at once, four in its queue, and an engine that
    is silent for 2 s is given up.
    """
    SLAI = "slai"
    """It is slai-proxy."""


class Failed(Exception):  # noqa: N818 - reads better at the place where it is raised
    """A case found something that is not right."""


Test = Callable[["Bench"], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One situation on the wire."""

    id: str
    area: str
    situation: str
    right: str
    why: str
    needs: frozenset[Claim]
    test: Test
    alone: bool
    """Whether it must not run beside others: it makes an engine look broken or busy."""
    seconds: float


CASES: list[Case] = []


def case(
    area: str,
    situation: str,
    *,
    right: str,
    why: str,
    needs: Sequence[Claim] = (Claim.RELAY,),
    alone: bool = False,
    seconds: float = 10.0,
) -> Callable[[Test], Test]:
    """Register a test as a case; its name with dashes is the case's id."""

    def register(test: Test) -> Test:
        name = getattr(test, "__name__", "").replace("_", "-")
        assert name not in {known.id for known in CASES}, f"{name} is there twice"
        CASES.append(
            Case(name, area, situation, right, why, frozenset((Claim.HTTP, *needs)), test, alone=alone, seconds=seconds)
        )
        return test

    return register


def check(condition: object, message: str) -> None:
    if not condition:
        raise Failed(message)


def equal(found: object, right: object, what: str) -> None:
    if found != right:
        raise Failed(f"{what}: {_short(found)}, not {_short(right)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:90]}...{text[-60:]} ({len(text)} characters)"


@dataclass
class Bench:
    """What a case works with: its scripted engines, and connections to the proxy."""

    host: str
    port: int
    model: str
    key: str
    engines: list[Upstream]
    scripts: Scripts
    token: str
    _open: list[Connection] = field(default_factory=list)

    def script(self, script: Script, *, early: bool = False) -> None:
        self.scripts.script, self.scripts.early = script, early

    def stream(self, *pieces: bytes) -> None:
        """Let engines answer with a stream, one HTTP chunk for each piece."""
        self.script(lambda call: call.stream(*pieces))

    @property
    def calls(self) -> list[Seen]:
        return self.scripts.seen

    async def call(self, seconds: float = 5.0) -> Seen:
        """Wait for the next request of this case at an engine."""
        await within(seconds, self.scripts.arrived.acquire(), "no engine got the request")
        return self.calls[-1]

    def body(self, *, stream: bool = True, chat: bool = False, **more: Any) -> bytes:
        """A small request of this case."""
        prompt = f"{self.token} hello"
        content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        fields = {"model": self.model, **content, "max_tokens": 16, "stream": stream, **more}
        return json.dumps(fields).encode()

    def headers(self, *more: str, content_type: str | None = "application/json") -> list[str]:
        own = [f"Authorization: Bearer {self.key}", f"X-Conformance: {self.token}"]
        return own + ([f"Content-Type: {content_type}"] if content_type else []) + list(more)

    async def connect(self) -> Connection:
        connection = await Connection.open(self.host, self.port)
        self._open.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    def request(
        self,
        body: bytes | None,
        *headers: str,
        path: str = COMPLETIONS,
        method: str = "POST",
        version: str = "HTTP/1.1",
    ) -> bytes:
        content_type = (
            None if body is None or any(h.lower().startswith("content-type:") for h in headers) else "application/json"
        )
        return request(method, path, self.headers(*headers, content_type=content_type), body, version=version)

    async def begin(self, body: bytes | None = None, *headers: str, **more: Any) -> Connection:
        """Send a request on a connection of its own; the answer is not read."""
        connection = await self.connect()
        await connection.send(self.request(self.body() if body is None else body, *headers, **more))
        return connection

    async def post(self, body: bytes | None = None, *headers: str, **more: Any) -> Answer:
        """Send a request and read its answer."""
        connection = await self.begin(body, *headers, **more)
        try:
            return await connection.answer()
        finally:
            connection.close()

    async def get(self, path: str, *headers: str, method: str = "GET") -> Answer:
        connection = await self.connect()
        await connection.send(self.request(None, *headers, path=path, method=method))
        try:
            return await connection.answer(method=method)
        finally:
            connection.close()

    async def works(self) -> None:
        """Check that a plain request is served."""
        self.stream(token("ok"), last(), DONE)
        answer = await self.post()
        equal(answer.status, 200, "status of a plain request afterwards")


async def within(seconds: float, waited: Awaitable[Any], message: str) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await waited
    except TimeoutError:
        raise Failed(f"{message} (within {seconds:g} s)") from None


async def plain(call: Seen) -> None:
    """What engines do where a case does not say: a stream of two tokens, or a whole answer."""
    if b'"stream": true' in call.body:
        await call.stream(token("a"), token("b"), last(), DONE)
    else:
        await call.answer(b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"ab"}]}')


class Result(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Verdict:
    case: Case
    result: Result
    message: str = ""
    seconds: float = 0.0


@dataclass
class Lab:
    """The engines, and the proxy in front of them."""

    model: str
    key: str
    engines: list[Upstream]
    cases: dict[bytes, Scripts]
    host: str = "127.0.0.1"
    port: int = 0

    @asynccontextmanager
    async def bench(self) -> AsyncIterator[Bench]:
        name = f"case-{secrets.token_hex(6)}"
        scripts = self.cases[name.encode()] = Scripts(plain)
        bench = Bench(self.host, self.port, self.model, self.key, self.engines, scripts, name)
        try:
            yield bench
        finally:
            bench.close()
            del self.cases[name.encode()]

    async def run(self, case: Case) -> Verdict:
        """Run one case; whatever goes wrong in it is told, not raised."""
        begun = time.monotonic()
        message = ""
        try:
            async with asyncio.timeout(case.seconds), self.bench() as bench:
                await case.test(bench)
            for error in bench.scripts.errors:
                message = f"{type(error).__name__}: {error}"
        except Failed as failed:
            message = str(failed)
        except TimeoutError:
            message = f"nothing happened for {case.seconds:g} s"
        except EOFError as error:
            message = str(error) or "the connection ended"
        except Exception as error:  # noqa: BLE001 - a proxy may do anything
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            message = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        result = Result.FAILED if message else Result.PASSED
        return Verdict(case, result, message, time.monotonic() - begun)


@asynccontextmanager
async def lab(model: str, key: str, ports: Sequence[int] = (0, 0)) -> AsyncIterator[Lab]:
    """Start the engines, one at each port; 0 takes a free one."""
    cases: dict[bytes, Scripts] = {}
    upstreams = [Upstream(number, cases, model, port) for number, port in enumerate(ports)]
    for upstream in upstreams:
        await upstream.start()
    try:
        yield Lab(model, key, upstreams, cases)
    finally:
        for upstream in upstreams:
            await upstream.stop()


async def run_all(
    lab: Lab,
    cases: Iterable[Case],
    claims: frozenset[Claim],
    *,
    at_once: int = 16,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Run all cases that the proxy's claims allow, side by side where that is possible."""
    chosen = list(cases)
    verdicts: dict[str, Verdict] = {}
    room = asyncio.Semaphore(at_once)

    async def one(case: Case) -> None:
        async with room:
            verdicts[case.id] = await lab.run(case)
        tell(verdicts[case.id])

    for case in chosen:
        if not case.needs <= claims:
            verdicts[case.id] = Verdict(case, Result.NOT_APPLICABLE)
    put = [case for case in chosen if case.id not in verdicts]
    async with asyncio.TaskGroup() as group:
        for case in sorted(put, key=lambda case: -case.seconds):  # those that wait begin first
            if not case.alone:
                group.create_task(one(case))
    for case in put:
        if case.alone:
            await one(case)
    return [verdicts[case.id] for case in chosen]
