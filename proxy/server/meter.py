"""Timing the tokens of a stream while its bytes pass."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from proxy.telemetry.report import MAX_BREACHES, Breach
from proxy.wire.openai import VISIBLE_TOKEN, read_chunk, read_index
from proxy.wire.repetition import Repetition
from proxy.wire.sse import EventSplitter

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.blame import Blame
    from proxy.telemetry.metrics import TbtHistogram
    from proxy.telemetry.report import RequestReport
    from proxy.wire.openai import ChunkView


class _Steps:
    """Steps of a stream with several answers: each step gives a token to every one of them that is not over."""

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()
        self._most = 0

    def count(self, payload: bytes) -> int:
        """Take in a payload with a token; 1 if it is the first of its step."""
        index = read_index(payload)
        self._tokens[index] += 1
        if self._tokens[index] <= self._most:
            return 0
        self._most = self._tokens[index]
        return 1


class StreamMeter:
    """Observes one stream of server-sent events; it never touches the bytes.

    The first *visible* token stops the TTFT clock. A token whose text the engine holds back (half a character, the
    start of a stop string) is a sign of life for the scheduler and ends a gap between tokens, but shows nothing yet.
    """

    __slots__ = (
        "_blame",
        "_histogram",
        "_on_tokens",
        "_read",
        "_repetition",
        "_report",
        "_splitter",
        "_steps",
        "_usual",
        "done",
        "error",
        "finished",
    )

    def __init__(
        self,
        report: RequestReport,
        histogram: TbtHistogram,
        on_tokens: Callable[[str, int, float], None],
        blame: Callable[[str, float, int, float], Blame | None] = lambda *_: None,
        read: Callable[[bytes], ChunkView] = read_chunk,
    ) -> None:
        """``read`` is that of the stream's API."""
        self._report = report
        self._histogram = histogram
        self._on_tokens = on_tokens
        self._blame = blame
        self._read = read
        self._splitter = EventSplitter()
        self._steps = _Steps() if report.sequences > 1 else None
        self._repetition = Repetition()
        self._usual: Repetition | None = None
        """The same where the next read may be such an event: as long as they come whole."""
        self.done = False
        """The stream's own end marker has passed."""
        self.finished = False
        """A finish reason has passed."""
        self.error = False
        """The engine reported an error inside the stream."""

    @property
    def complete(self) -> bool:
        """Whether the stream has told its end, by its marker, a finish reason or an error."""
        return self.done or self.finished or self.error

    @property
    def at_boundary(self) -> bool:
        return self._splitter.at_boundary

    def on_read(self, data: bytes, now: float) -> None:
        """Look at one read of the stream that came at ``now``."""
        if self._usual is not None and self._usual.fits(data):
            self._count(1, now)
        else:
            self._look_into(data, now)

    def _look_into(self, data: bytes, now: float) -> None:
        """Look at a read that is not as the others are."""
        report, splitter = self._report, self._splitter
        whole = splitter.between_events
        chunks, visible = 0, report.times.first_at is not None
        plain = 0
        payloads = splitter.feed(data)
        for payload in payloads:
            view = self._read(payload)
            if view is VISIBLE_TOKEN and self._steps is None:
                visible = True
                chunks += 1
                plain += 1
                continue
            if view.visible or view.held_back:
                visible = visible or view.visible
                if self._steps is None:
                    chunks += 1
                else:
                    step = self._steps.count(payload)
                    chunks += step
                    report.sibling_chunks += 1 - step
            if view.completion_tokens is not None:
                report.completion_tokens = view.completion_tokens
            if view.prompt_tokens is not None:
                report.prompt_tokens = view.prompt_tokens or report.prompt_tokens
                report.prompt_tokens_told, report.cached_tokens = view.prompt_tokens, view.cached_tokens
            self.done |= view.done
            if view.finish_reason is not None:
                self.finished = True
                report.finish_reason = view.finish_reason
            self.error |= view.error
        if whole and splitter.between_events and plain == len(payloads) == 1:
            self._repetition.learn(data, report.times.chunks)
        self._usual = self._repetition if self._repetition.known and splitter.between_events else None
        if visible and chunks:
            self._count(chunks, now)
        elif chunks:
            self._on_tokens(report.request_id, chunks, now)

    def _count(self, chunks: int, now: float) -> None:
        """Count tokens of a stream of which something shows."""
        report = self._report
        times = report.times
        gap = times.on_read(now, chunks)
        if gap is not None:
            self._histogram.observe(gap)
        self._on_tokens(report.request_id, chunks, now)
        if gap is not None and times.tbt_seconds is not None and gap > times.tbt_seconds:
            self._explain(gap, chunks, now)  # after the scheduler has been told that it came

    def _explain(self, gap: float, chunks: int, now: float) -> None:
        """Keep and count why a token came late; after the scheduler has been told that it did."""
        report = self._report
        blame = self._blame(report.request_id, gap, chunks, now)
        if blame is None:
            return
        self._histogram.blame(blame.cause)
        if len(report.breaches) < MAX_BREACHES:
            report.breaches.append(Breach(now, gap, blame))
