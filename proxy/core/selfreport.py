"""What an engine says of itself, set against what we believe: an error in our account, load that is not ours, distress.

An engine's own figures come seconds apart and late, so they never replace the belief, which follows every token. They
correct its drift: prompt lengths that were estimated, prefixes that requests share, other clients of the engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

_CORRECTION = 0.25
"""Share of the difference that each report puts right: a report may have met the engine between two steps."""
_FOREIGN_REPORTS = 3
"""Sequences count as somebody else's only when so many reports in a row have them: ends and starts cross reports."""
_CAUTION_STEP = 0.01
_CAUTION_MOST = 0.1
_CAUTION_HALVING_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's own figures at one moment."""

    running: int
    waiting: int
    """Sequences in its queue, those that it has preempted among them."""
    kv_usage: float
    """Share of its KV cache in use, 0 to 1."""
    preemptions: int
    """Since its start."""
    tokens: int | None = None
    """Prompt and output tokens since its start, if it tells."""
    started_at: float | None = None
    """When its process was started (Unix seconds), if it tells."""


class SelfReports:
    """What follows from an engine's reports; nothing, as long as there are none."""

    def __init__(self) -> None:
        self.kv_error = 0.0
        """Tokens of KV cache in use beyond those that we account for; negative if there are fewer."""
        self.foreign = 0
        """Sequences that others have given to the engine."""
        self.caution = 0.0
        """Share of the KV cache that stays free beside all else, because the engine has had to preempt."""
        self.preempted_at = -inf
        """When it last told of sequences that it had preempted since the report before."""
        self.told: EngineReport | None = None
        """The last one; ``None`` while the engine does not report."""
        self.fresh = False
        """Whether the engine reports at present."""
        self._tokens: int | None = None
        self._started_at: float | None = None
        self._surplus: deque[int] = deque(maxlen=_FOREIGN_REPORTS)
        self._preemptions: int | None = None
        self._at = 0.0

    def take(self, report: EngineReport, kv_capacity: int | None, own_kv: int, own_sequences: int, now: float) -> None:
        """Take in a report. ``own_kv``: tokens that our sequences hold by our account, without those still to come."""
        self.caution *= 0.5 ** ((now - self._at) / _CAUTION_HALVING_SECONDS)
        self._at, self.fresh, self.told = now, True, report
        if self._preemptions is not None and report.preemptions > self._preemptions:
            # One shortage evicts several sequences, so what counts is that there was one.
            self.caution = min(_CAUTION_MOST, self.caution + _CAUTION_STEP)
            self.preempted_at = now
        self._preemptions, self._tokens, self._started_at = report.preemptions, report.tokens, report.started_at
        if kv_capacity is not None:
            off = report.kv_usage * kv_capacity - own_kv - self.kv_error
            if off > 0 or not report.waiting:  # what it preempted holds nothing now, but will again
                self.kv_error += _CORRECTION * off
        self._surplus.append(report.running + report.waiting - own_sequences)
        self.foreign = max(0, min(self._surplus)) if len(self._surplus) == _FOREIGN_REPORTS else 0

    def tells_restart(self, report: EngineReport) -> bool:
        """Whether the engine has started anew since its last report: by its own word, or as its counters fell."""
        other = None not in {report.started_at, self._started_at} and report.started_at != self._started_at
        counts = ((report.tokens, self._tokens), (report.preemptions, self._preemptions))
        return other or any(new is not None and old is not None and new < old for new, old in counts)

    def tells_progress(self, report: EngineReport) -> bool:
        """Whether the engine has made tokens since its last report."""
        return report.tokens is not None and self._tokens is not None and report.tokens != self._tokens

    @property
    def tells_of_progress(self) -> bool:
        """Whether its reports would tell of tokens that it makes."""
        return self.fresh and self._tokens is not None

    def forget(self) -> None:
        """The engine has stopped to report: what it said last is no longer believed, but caution stays."""
        self.kv_error, self.foreign, self.fresh, self._preemptions, self.told = 0.0, 0, False, None, None
        self._surplus.clear()
