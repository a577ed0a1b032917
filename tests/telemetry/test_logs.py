"""What is worth a line in the log, and what any client could flood it with."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError
from aiohttp.http_exceptions import BadStatusLine, LineTooLong
from live_proxy import exchange, live_proxy, raw_post, until
from scripted_engine import reset, scripted_engine

from proxy.telemetry.logs import is_our_fault, set_up_logging


@pytest.fixture
def _logging_as_in_production() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("aiohttp.server", "httpx", "httpcore")]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    set_up_logging("debug")
    yield
    for logger, (level, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.filters[:] = filters


def record_of(error: Exception | None) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": "x", "exc_info": error and (type(error), error, None)})


@pytest.mark.parametrize(
    "error",
    [
        BadStatusLine("garbage"),
        LineTooLong(b"x", 8190),
        web.RequestPayloadError("cannot be decoded"),
        ClientConnectionResetError("Cannot write to closing transport"),
        ConnectionResetError(),
        BrokenPipeError(),
    ],
)
def test_malformed_requests_and_clients_that_leave_are_not(error: Exception) -> None:
    assert not is_our_fault(record_of(error))


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyError("x"), OSError(24, "Too many open files"), None])
def test_faults_of_our_own_and_all_else_are(error: Exception | None) -> None:
    assert is_our_fault(record_of(error))


@pytest.mark.usefixtures("_logging_as_in_production")
@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        raw_post(b"garbage", "Content-Encoding: gzip"),
        raw_post(b"0\r\n\r\n", "Transfer-Encoding: chunked"),
    ],
)
async def test_a_malformed_request_makes_no_line(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_engine() as engine, live_proxy(engine) as proxy:
        caplog.clear()
        assert (await exchange(proxy, data)).startswith(b"HTTP/1.")
        assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.usefixtures("_logging_as_in_production")
async def test_a_client_that_leaves_makes_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_engine(lambda call: until(call.gone.is_set)) as engine, live_proxy(engine) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(raw_post(b'{"model": "m", "prompt": "x"}'))
        await until(lambda: engine.calls)
        reset(writer)
        await until(proxy.outcomes)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []
