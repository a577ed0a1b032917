"""Log lines: to standard error, one per event, never with prompt text or keys."""

from __future__ import annotations

import logging
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_CLIENTS_FAULT = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


def set_up_logging(level: str) -> None:
    """Write log lines of ``level`` and above to standard error."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for library in ("httpx", "httpcore"):  # a line for every probe
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(is_our_fault)


def is_our_fault(record: logging.LogRecord) -> bool:
    """Whether a record of aiohttp's server is worth a line.

    It logs a stack trace for every malformed request and for clients that leave: any client could flood the log.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], _CLIENTS_FAULT)
