"""How long an engine that turned a request away gets nothing."""

from __future__ import annotations

_FIRST_SECONDS = 1.0
_SHORTEST_SECONDS = 0.1
MAX_BACK_OFF_SECONDS = 30.0
"""Also what an engine may ask for at most: it may be up again long before that, and only a request can tell."""


class BackOff:
    """One engine's refusals in a row."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = 0.0

    def refused(self, asked_seconds: float | None, now: float) -> float:
        """Note a refusal at ``now`` and return until when to leave the engine alone.

        What the engine asks for holds, within bounds. One that asks for nothing gets a second, and twice as long each
        time that it refuses again, until it has taken requests for as long as it last was left alone. Requests that
        were on their way when the first one was refused tell nothing new.
        """
        if asked_seconds is not None:
            self._seconds = min(max(asked_seconds, _SHORTEST_SECONDS), MAX_BACK_OFF_SECONDS)
        elif now < self._until:
            return self._until
        elif now < self._until + self._seconds:
            self._seconds = min(2 * self._seconds, MAX_BACK_OFF_SECONDS)
        else:
            self._seconds = _FIRST_SECONDS
        self._until = max(self._until, now + self._seconds)
        return self._until
