"""Headers: which ones travel on, and what a client asks of the scheduler with them.

``x-slo-class``
    names one of the configured classes of requests.
``x-slo-ttft-ms``, ``x-slo-tbt-ms``
    this request's own deadlines. ``x-slo-tpot-ms``, which other tools send, means the TBT deadline too;
    where both are given, ``x-slo-tbt-ms`` holds.
``x-slo-ttft-limit-ms``
    the time after which the first token would be of no more use: a request that cannot have it by then is refused.
``x-slai-no-queue``
    ``1``: refuse the request rather than let it wait.
``x-slai-timing``
    ``1``: tell in the answer how long the request was held back (``wire.timing``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from multidict import istr

from proxy.wire.keys import CREDENTIALS
from proxy.wire.openai import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multidict import MultiMapping

    from proxy.core.request import RequestClass

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers about one connection, in lower case; RFC 9110, section 7.6.1."""

_HOP_BY_HOP = frozenset(name.encode() for name in HOP_BY_HOP)
_BODILESS = frozenset((204, 205, 304))

# The client side of the relay sets its own host and length, and "Expect: 100-continue" has been answered.
_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "expect"}
_NOT_FORWARDED_NOR_CREDENTIALS = _NOT_FORWARDED | CREDENTIALS

# What clients tell the scheduler ends here: it is no business of the engine, nor may a client speak to the
# engine in the scheduler's name ("x-slai-").
_OUR_PREFIXES = ("x-slo-", "x-slai-")

_HARMLESS = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Of this type, a name is known by its hash alone.
_CONNECTION, _REQUEST_ID, _CLASS, _NO_QUEUE = map(
    istr, ("Connection", "X-Request-Id", "x-slo-class", "x-slai-no-queue")
)
_TTFT, _TTFT_LIMIT = istr("x-slo-ttft-ms"), istr("x-slo-ttft-limit-ms")
_TBT, _TPOT = istr("x-slo-tbt-ms"), istr("x-slo-tpot-ms")
_LONGEST_DEADLINE_SECONDS = 3600.0


def forward_request_headers(headers: MultiMapping[str], *, keep_credentials: bool = True) -> list[tuple[str, str]]:
    """Return the client's headers that an engine should get, in their order and with repeated ones kept.

    ``keep_credentials`` passes the client's API key on, for an engine that checks it: never one that is the proxy's.
    """
    dropped = _NOT_FORWARDED if keep_credentials else _NOT_FORWARDED_NOR_CREDENTIALS
    if _CONNECTION in headers:
        dropped |= _named_in_connection(headers)
    return [
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in dropped and not lower.startswith(_OUR_PREFIXES)
    ]


def forward_response_headers(headers: MultiMapping[str], *, keep_content_length: bool) -> list[tuple[str, str]]:
    """Return an engine's headers that the client should get, in their order and with repeated ones kept.

    ``keep_content_length`` is for an answer that is relayed whole. A length beside a Transfer-Encoding is
    dropped in any case, as it is then not the body's (RFC 9112, section 6.3).
    """
    dropped = HOP_BY_HOP
    if _CONNECTION in headers:
        dropped |= _named_in_connection(headers)
    if not keep_content_length or "Transfer-Encoding" in headers:
        dropped |= {"content-length"}
    return [
        (name, value if value.isascii() else _in_utf8(value))
        for name, value in headers.items()
        if name.lower() not in dropped
    ]


def plain_head(
    status: int,
    reason: str,
    headers: Iterable[tuple[bytes, bytes]],
    defaults: dict[bytes, bytes],
    instead: Mapping[str, str],
) -> bytes | None:
    """Return the head of an answer with an engine's headers, as the client gets it.

    ``defaults``: whole lines, by names in lower case, for where the engine sends no such header.
    ``instead``: ours in the place of the engine's, with their names in lower case.
    ``None`` if there is more to it: a header about the connection, a body of untold length, or a status without one.
    """
    if status in _BODILESS:
        return None
    lines = [f"HTTP/1.1 {status} {reason}".encode()]
    length_told = False
    for name, value in headers:
        lower = name.lower()
        if lower in _HOP_BY_HOP:
            return None
        if lower == b"content-length":
            length_told = True
        defaults.pop(lower, None)
        if not instead or lower.decode("latin-1") not in instead:
            lines.append(name + b": " + value)
    lines += [f"{name}: {value}".encode() for name, value in instead.items()]
    lines += defaults.values()
    lines.append(b"\r\n")
    return b"\r\n".join(lines) if length_told else None


def request_id(headers: MultiMapping[str]) -> str | None:
    """Return the client's ``X-Request-Id`` if it is harmless in a log line, a header and a URL."""
    value = headers.get(_REQUEST_ID)
    return value if value is not None and _HARMLESS.fullmatch(value) else None


def request_class(
    headers: MultiMapping[str], classes: Mapping[str, RequestClass], default: RequestClass
) -> RequestClass:
    """Return the class that the client asks for, with the deadlines that it sets for this request alone.

    The name stays a configured one whatever the deadlines are, so that metric labels stay bounded.

    Raises:
        BadRequest: an unknown class, or a deadline that is not a positive number of at most one hour.
    """
    found = default
    name = headers.get(_CLASS)
    if name is not None:
        if name not in classes:
            known = ", ".join(sorted(classes)) or "none"
            raise BadRequest(f"x-slo-class: there is no class {name[:100]!r}; known: {known}", param="x-slo-class")
        found = classes[name]
    if not (_TTFT in headers or _TTFT_LIMIT in headers or _TBT in headers or _TPOT in headers):
        return found
    ttft, limit = _deadline_seconds(headers, _TTFT), _deadline_seconds(headers, _TTFT_LIMIT)
    tbt, tpot = _deadline_seconds(headers, _TBT), _deadline_seconds(headers, _TPOT)
    if tbt is None:
        tbt = tpot
    return replace(
        found,
        ttft_seconds=found.ttft_seconds if ttft is None else ttft,
        tbt_seconds=found.tbt_seconds if tbt is None else tbt,
        ttft_limit_seconds=found.ttft_limit_seconds if limit is None else limit,
    )


def may_wait(headers: MultiMapping[str]) -> bool:
    """Return whether the client lets its request be queued.

    Raises:
        BadRequest: ``x-slai-no-queue`` is neither 0 nor 1.
    """
    value = headers.get(_NO_QUEUE, "0")
    if value not in ("0", "1"):
        raise BadRequest("x-slai-no-queue must be 0 or 1", param="x-slai-no-queue")
    return value == "0"


def retry_after_seconds(headers: MultiMapping[str]) -> float | None:
    """Return how long an engine asks to be left alone; ``None`` if it does not, or not in a number.

    ``retry-after-ms`` is more exact than ``Retry-After``, and wins.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= seconds < inf:
            return seconds
    return None


def _deadline_seconds(headers: MultiMapping[str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        # float() also takes digits of other scripts, and underscores between digits.
        seconds = float(text) / 1000 if text.isascii() and "_" not in text else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_DEADLINE_SECONDS:  # false for nan, too
        raise BadRequest(f"{name} must be a number of milliseconds above 0 and at most 3600000", param=str(name))
    return seconds


def _in_utf8(value: str) -> str:
    """Return a value whose bytes are not UTF-8 as text, read as Latin-1: the server side would lose those bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


def _named_in_connection(headers: MultiMapping[str]) -> set[str]:
    return {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
