"""Is an engine fit for work? What its own ``/health`` cannot tell, told by how it treats the work that it has.

A state machine for one engine::

    HEALTHY ──fails too often──────────────> EJECTED ──its time is over──> PROBATION
       ^ ^                                      ^                             │  │
       │ └─time goes by── SLOW_START <──────────┼──────makes a token──────────┘  │
       │                      └──────fails──────┴──────────fails─────────────────┘
       └──makes a token── STALLED ──nothing of ours is left there──> PROBATION

``STALLED`` is the progress watchdog: work was given to it and no token has come for many of its steps, though it may
answer ``/health`` all the while. Failures are those of the engine: it cut an answer, answered 5xx, or said nothing for
too long. A client that leaves, an error that is the client's own, and 429 or 503 (the engine's queue is full) are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """Whether an engine gets work. Metric label."""

    HEALTHY = "healthy"
    SLOW_START = "slow_start"
    """It has just come, or come back: it gets a part of its share, which grows."""
    EJECTED = "ejected"
    """It failed too often: nothing for some time."""
    PROBATION = "probation"
    """One request at a time, to see whether it works again."""
    STALLED = "stalled"
    """It does not work on what it has: nothing new."""


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When an engine is taken out. Durations are seconds."""

    failures_in_a_row: int = 5
    failure_share: float = 0.5
    """Of the latest requests, as a moving average over some 10 of them."""
    most_ejected_share: float = 0.5
    """Of the engines that are up: more are not ejected, and no model's last one ever is."""
    ejection_seconds: float = 5.0
    """The first time; twice as long each time that it fails again on its return."""
    longest_ejection_seconds: float = 60.0
    slow_start_seconds: float = 10.0
    silent_steps: int = 100
    """An engine that has work and gives no token for so many of its steps does not work."""
    least_silence_seconds: float = 10.0
    """Before that nothing is said: one step may be far longer than those before."""
    blind_factor: float = 3.0
    """By how much longer one may be silent whose own figures do not tell whether it makes progress."""

    def __post_init__(self) -> None:
        durations = (
            self.ejection_seconds,
            self.longest_ejection_seconds,
            self.slow_start_seconds,
            self.least_silence_seconds,
        )
        if min(durations) <= 0 or min(self.failures_in_a_row, self.silent_steps) < 1 or self.blind_factor < 1:
            raise ValueError("durations and numbers of the health rules must be positive")
        if not (0 < self.failure_share <= 1 and 0 <= self.most_ejected_share <= 1):
            raise ValueError("shares of the health rules lie in 0 to 1")


_FIRST_SHARE = 0.1
_WEIGHT = 0.1
_LEAST_REQUESTS = 10


class Health:
    """The condition of one engine. ``now`` never decreases from call to call."""

    __slots__ = (
        "_config",
        "_ejection_seconds",
        "_failing",
        "_in_a_row",
        "_judged",
        "_since",
        "condition",
        "ejections",
        "probe",
        "progress_at",
        "stalls",
        "until",
    )

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self.condition = Condition.HEALTHY
        self.until: float | None = None
        """End of an ejection."""
        self.probe: str | None = None
        """On probation: the request by which it is tried."""
        self.progress_at = 0.0
        """When it last gave a sign of working on what it has, or got work when it had none."""
        self.ejections = 0
        self.stalls = 0
        self._since = 0.0
        self._ejection_seconds = config.ejection_seconds
        self._forget()

    def __repr__(self) -> str:
        return f"<Health {self.condition}>"

    def takes(self, now: float) -> bool:
        """Whether anything may be given to it, as far as this goes."""
        match self.condition:
            case Condition.HEALTHY | Condition.SLOW_START:
                return True
            case Condition.PROBATION:
                return self.probe is None
            case Condition.EJECTED:
                return self.until is not None and now >= self.until
            case Condition.STALLED:
                return False

    def share(self, now: float) -> float:
        """How much of what it could be given it is given, above 0 and at most 1."""
        if self.condition is not Condition.SLOW_START:
            return 1.0
        done = (now - self._since) / self._config.slow_start_seconds
        return min(1.0, _FIRST_SHARE + (1 - _FIRST_SHARE) * max(0.0, done))

    def fails_too_often(self) -> bool:
        """Whether it is to be ejected. One that has just come back is not trusted for a second failure."""
        if self.condition in {Condition.SLOW_START, Condition.PROBATION} and self.ejections and self._in_a_row:
            return True
        often = self._judged >= _LEAST_REQUESTS and self._failing >= self._config.failure_share
        return self._in_a_row >= self._config.failures_in_a_row or often

    def silence_limit(self, step_seconds: float, wait_seconds: float, *, blind: bool) -> float:
        """Seconds without progress after which it is stalled.

        ``step_seconds``: predicted of a step; ``wait_seconds``: until the first token of what it has, if no stream
        runs. ``blind``: its own figures do not tell of progress.
        """
        limit = max(self._config.least_silence_seconds, self._config.silent_steps * step_seconds + wait_seconds)
        return limit * self._config.blind_factor if blind else limit

    def may_be_silent(self, now: float) -> bool:
        """Whether it gave a sign so lately that no more needs to be known."""
        return now - self.progress_at < self._config.least_silence_seconds

    @property
    def most_ejected_share(self) -> float:
        return self._config.most_ejected_share

    # -- what happens to it --

    def join(self, now: float, *, gently: bool) -> None:
        """It has come, come back or started anew. ``gently``: others have been working, and it is cold."""
        self._forget()
        self.until = self.probe = None
        self.progress_at = now
        self._enter(Condition.SLOW_START if gently else Condition.HEALTHY, now)

    def release(self, request_id: str, now: float) -> None:
        """It is given a request."""
        self.tick(now)
        if self.condition is Condition.PROBATION:
            self.probe = request_id

    def progress(self, now: float) -> None:
        """It has worked on what it has: a token came, or its own figures tell so."""
        self.progress_at = now
        if self.condition is Condition.STALLED:
            self._enter(Condition.HEALTHY, now)

    def first_token(self, request_id: str, now: float) -> None:
        """It has begun the answer to a request."""
        if request_id == self.probe:
            self._return(now)

    def served(self, request_id: str, now: float) -> None:
        """It has answered a request as it should."""
        self._in_a_row = 0
        self._note(0.0)
        if request_id == self.probe:
            self._return(now)

    def failed(self, request_id: str) -> None:
        """It has failed a request."""
        self._in_a_row += 1
        self._note(1.0)
        if request_id == self.probe:
            self.probe = None

    def left(self, request_id: str) -> None:
        """A request is over in a way that says nothing of the engine."""
        if request_id == self.probe:
            self.probe = None

    def eject(self, now: float) -> None:
        """Give it nothing for some time."""
        self.ejections += 1
        self.until, self.probe = now + self._ejection_seconds, None
        self._ejection_seconds = min(2 * self._ejection_seconds, self._config.longest_ejection_seconds)
        self._failing, self._judged = 0.0, 0
        self._enter(Condition.EJECTED, now)

    def stall(self, now: float) -> None:
        """Give it nothing until it has made progress."""
        self.stalls += 1
        self.until = self.probe = None
        self._enter(Condition.STALLED, now)

    def emptied(self, now: float) -> None:
        """Nothing of ours is left there, so nothing could tell of its progress."""
        if self.condition is Condition.STALLED:
            self._enter(Condition.PROBATION, now)

    def tick(self, now: float) -> None:
        """Do what has become due by ``now``."""
        if self.condition is Condition.EJECTED and self.until is not None and now >= self.until:
            self.until = None
            self._enter(Condition.PROBATION, now)
        elif self.condition is Condition.SLOW_START and now >= self._since + self._config.slow_start_seconds:
            self._ejection_seconds = self._config.ejection_seconds
            self._enter(Condition.HEALTHY, now)

    def _return(self, now: float) -> None:
        self._in_a_row, self.probe = 0, None
        self._enter(Condition.SLOW_START, now)

    def _enter(self, condition: Condition, now: float) -> None:
        self.condition, self._since = condition, now

    def _note(self, failure: float) -> None:
        self._judged += 1
        self._failing += max(_WEIGHT, 1 / self._judged) * (failure - self._failing)

    def _forget(self) -> None:
        self._in_a_row, self._failing, self._judged = 0, 0.0, 0
