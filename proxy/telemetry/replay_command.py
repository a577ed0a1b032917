"""``slai-proxy replay``: does this version decide what the log says was decided?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy import __version__
from proxy.core.actions import describe
from proxy.core.events import Arrived, Ended
from proxy.telemetry.chronicle import Chronicle, Stage
from proxy.telemetry.replay import Difference, Log, LogError, open_log, replay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.actions import Action
    from proxy.core.events import Event

_SAME, _DIFFERENT, _UNREADABLE = 0, 1, 2

_UNKNOWN = ("client_id", "tokens", "tbt_max_seconds", "missed", "outcome", "reason")
"""What a log has nothing of: it is the scheduler's, and not that of those who answer clients."""
_AT_ENGINE = (Stage.FIRST_TOKEN, Stage.STREAMING)
"""A log holds only the tokens that led to a decision, so it cannot tell one from the other."""

DESCRIPTION = """\
Feed the events of a decision log (slai-proxy serve or simulate, --decision-log) to a fresh scheduler with the log's own
configuration, and compare every decision. Older parts of the log (LOG.1, LOG.2, ...) are found by themselves."""

EPILOG = """\
exit status: 0 all decisions are reproduced; 1 one is not (the first is shown); 2 the log cannot be read
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``replay`` to a program's commands."""
    parser = subparsers.add_parser(
        "replay",
        help="decide anew what a decision log holds, and compare",
        usage="slai-proxy replay [--explain NUMBER] LOG",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="the decision log")
    parser.add_argument(
        "--explain",
        metavar="NUMBER",
        help='print the life of the request with this number of the proxy\'s own ("request_id" in /debug/requests/ID), '
        "as JSON on standard output",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``slai-proxy replay`` and return the exit status."""
    life = _Life(args.explain)
    try:
        log = open_log(args.log)
        found = replay(log, life.observe if args.explain is not None else None)
    except LogError as error:
        _tell(f"slai-proxy replay: {error}")
        return _UNREADABLE
    if args.explain is not None and not life.print():
        _tell(
            f"slai-proxy replay: no request {args.explain!r} in the log: it knows the proxy's own numbers "
            f'("request_id" in /debug/requests/ID), here {life.numbers}'
        )
        return _UNREADABLE
    for remark in _remarks(log):
        _tell(remark)
    if found.difference is not None:
        _tell("\n".join(_told(found.difference)))
        return _DIFFERENT
    _tell(f"{found.events:,} events, {found.actions:,} decisions: all reproduced")
    return _SAME


def _remarks(log: Log) -> Iterator[str]:
    if log.head.proxy != __version__:
        yield f"written by slai-proxy {log.head.proxy}; this is {__version__}, whose rules may differ"
    if log.truncated:
        yield "the last line is cut off (a crash, or it is being written): left out"


def _told(difference: Difference) -> Iterator[str]:
    now = difference.step.now
    yield f"{difference.where}: another decision at {now:.6f}, after {difference.step.event or 'a tick'}"
    yield f"  logged:   {_actions(difference.step.actions, now)}"
    yield f"  replayed: {difference.error or _actions(difference.actions, now)}"
    if difference.before:
        yield "before it:"
    for where, step in difference.before:
        yield f"  {where}: {step.now:.6f} {step.event or 'tick'} -> {_actions(step.actions, step.now)}"


def _actions(actions: list[Action], now: float) -> str:
    return "; ".join(describe(action, now).partition(" ")[2] for action in actions) or "nothing"


class _Life:
    """What became of one request in the course of a replay."""

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id or ""
        self._chronicle = Chronicle()
        self._told: dict[str, Any] | None = None
        self._now = 0.0
        self._first: str | None = None
        self._last: str | None = None

    @property
    def numbers(self) -> str:
        """From which number to which the log's requests go."""
        return "none" if self._first is None else f"{self._first} to {self._last}"

    def observe(self, event: Event | None, actions: list[Action], now: float) -> None:
        self._chronicle.observe(event, actions, now)
        self._now = now
        if isinstance(event, Arrived):
            seen = [number for number in (self._first, self._last, event.request.id) if number is not None]
            self._first, self._last = min(seen, key=_by_size), max(seen, key=_by_size)
        if isinstance(event, Ended) and event.request_id == self._request_id:
            self._tell()

    def print(self) -> bool:
        """Print it, if there is such a request."""
        if self._told is None:
            self._tell()
        if self._told is None:
            return False
        sys.stdout.write(json.dumps(self._told, indent=2) + "\n")
        return True

    def _tell(self) -> None:
        story = self._chronicle.find(self._request_id)
        self._told = None
        if story is not None:
            told = story.tell(self._now)
            self._told = {name: value for name, value in told.items() if name not in _UNKNOWN}
            if story.stage in _AT_ENGINE:
                self._told["stage"] = "at its engine"


def _by_size(number: str) -> tuple[int, str]:
    return len(number), number


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
