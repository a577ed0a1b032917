"""slai-proxy passes its own conformance suite; and a proxy that does things wrong does not."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance.catalogue import all_cases
from conformance.client import Answer
from conformance.proxies import claims_of, known_proxies, put_through
from conformance.report import as_json, line, table_of_cases, table_of_proxies, table_of_results
from conformance.suite import CASES, Claim, Lab, Result, Verdict, lab, run_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.mark.e2e
async def test_slai_proxy_passes_every_case() -> None:
    async with lab("m", "sk-conformance") as the_lab:
        verdicts = await put_through(known_proxies()["slai-proxy"], the_lab, all_cases())
    assert not [line(verdict) for verdict in verdicts if verdict.result is not Result.PASSED]
    assert len(verdicts) > 100


@asynccontextmanager
async def poor_proxy(the_lab: Lab) -> AsyncIterator[None]:
    """Reads an answer whole before it passes on its first 500 bytes, says 200 in any case and never looks back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1]) if length else 0)
            other, upstream = await asyncio.open_connection("127.0.0.1", the_lab.engines[0].port)
            upstream.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
            answer = b""
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(1.5):
                    while data := await other.read(65536):
                        answer += data
                        if answer.endswith((b"0\r\n\r\n", b"}")):
                            break
            upstream.close()
            writer.write(b"HTTP/1.1 200 OK\r\n" + answer.partition(b"\r\n")[2][:500])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    the_lab.port = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()


async def test_a_poor_proxy_fails_where_it_is_poor() -> None:
    chosen = {
        "stream-plain": Result.PASSED,
        "stream-not-buffered": Result.FAILED,
        "stream-long-lines": Result.FAILED,
        "stream-cut": Result.FAILED,
        "leaves-while-waiting-for-a-whole-answer": Result.FAILED,
        "engine-errors-pass": Result.FAILED,
        "unknown-model": Result.NOT_APPLICABLE,
        "queue-full": Result.NOT_APPLICABLE,
    }
    cases = [case for case in all_cases() if case.id in chosen]
    async with lab("m", "key") as the_lab, poor_proxy(the_lab):
        verdicts = await run_all(the_lab, cases, claims_of(["relay", "paths", "llm", "retry"]))
    assert {verdict.case.id: verdict.result for verdict in verdicts} == chosen
    assert all(verdict.message for verdict in verdicts if verdict.result is Result.FAILED)


def test_tables() -> None:
    first, second = CASES[:2]
    verdicts = [Verdict(first, Result.PASSED), Verdict(second, Result.FAILED, "a | b")]
    result = as_json("x", "1.0", verdicts)
    assert "| x | 1.0 | 1 | 1 | 0 |" in table_of_proxies([result])
    table = table_of_results([result], [first, second])
    assert f"| `{first.id}` | ok |" in table
    assert f"| `{second.id}` | **failed** |" in table


def test_the_readme_has_the_table_of_cases() -> None:
    """``python -m conformance --list`` prints it."""
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    assert table_of_cases(all_cases()) in readme


def test_what_shows_that_the_proxy_holds_is_there() -> None:
    """All cases and tests that SITUATIONS.md names."""
    here, ids = Path(__file__).parent, {case.id for case in all_cases()}
    rows = (here / "SITUATIONS.md").read_text(encoding="utf-8").splitlines()
    named = [name for row in rows if row.startswith("|") for name in re.findall(r"`([^` ]+)`", row.split(" | ")[-1])]
    assert len(named) > 100
    for name in named:
        path, _, test = name.partition("::")
        if test:
            source = (here.parent / path).read_text(encoding="utf-8")
            assert re.search(rf"^ *(async )?(def|class) {test}\b", source, re.MULTILINE), name
        else:
            assert name in ids


def test_known_proxies_claim_what_there_is() -> None:
    proxies = known_proxies()
    assert proxies["slai-proxy"].claims == frozenset(Claim)
    assert all(Claim.HTTP in proxy.claims for proxy in proxies.values())
    assert proxies["slai-proxy"].limited is not None


def test_answers_are_read_as_they_came() -> None:
    answer = Answer(200, "OK", [("A", "1"), ("a", "2"), ("Content-Type", "Text/Plain; x=y")], body=b"a\n\nb\n\n")
    assert answer.header("a") == ["1", "2"]
    assert answer.content_type == "text/plain"
    assert answer.events == [b"a", b"b"]
