"""How fast a queue empties, learnt from nothing but its own releases, and so when somebody in it would be next.

What limits an engine differs (prompt tokens per step, KV cache, sequence slots), and so does what competes for it. The
one honest figure is the work that was released per second while somebody waited.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import floor, inf
from operator import itemgetter
from typing import NamedTuple

from proxy.core.fairness import Flow

_CHUNK = 128
"""Entries in a run of ``WorkInOrder``; it is split at twice as many."""
_RELEASES = 48
"""Releases after which one has lost 63 % of its weight: a rate within 15 %, and a second in front of a busy cluster."""
_TRUSTED_RELEASES = 24
_GREAT = 1e100
_ALIKE = Flow()
_BUCKET = 0.25
"""Width of a bucket of arrivals in units of the key: a fifth in length where the shortest go first."""


class _Place(NamedTuple):
    key: float
    number: int
    tokens: int


_key = itemgetter(0)


class WorkInOrder:
    """The work that waits, in the order of keys, and how much of it lies before a key.

    Runs of a few hundred entries with their sums: both cost less than a sorted list costs anyway.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._runs: list[list[_Place]] = []
        self._ends: list[_Place] = []  # the last of each run
        self._sums: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def copy(self) -> WorkInOrder:
        """Return one that goes its own way from here."""
        made = WorkInOrder()
        made.tokens = self.tokens
        made._runs = [run[:] for run in self._runs]
        made._ends, made._sums = self._ends[:], self._sums[:]
        return made

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, key: float, number: int, tokens: int) -> None:
        place = _Place(key, number, tokens)
        self.tokens += tokens
        if not self._runs:
            self._runs, self._ends, self._sums = [[place]], [place], [tokens]
            return
        i = min(bisect_left(self._ends, place), len(self._runs) - 1)
        run = self._runs[i]
        insort(run, place)
        self._ends[i] = run[-1]
        self._sums[i] += tokens
        if len(run) > 2 * _CHUNK:
            self._runs[i : i + 1] = run[:_CHUNK], run[_CHUNK:]
            self._ends[i : i + 1] = run[_CHUNK - 1], run[-1]
            first = sum(p.tokens for p in run[:_CHUNK])
            self._sums[i : i + 1] = first, self._sums[i] - first

    def remove(self, key: float, number: int, tokens: int) -> None:
        """Remove what was added with just these.

        Raises:
            KeyError: it is not there.
        """
        place = _Place(key, number, tokens)
        i = bisect_left(self._ends, place)
        run = self._runs[i] if i < len(self._runs) else []
        j = bisect_left(run, place)
        if j == len(run) or run[j] != place:
            raise KeyError(place)
        del run[j]
        self.tokens -= tokens
        self._sums[i] -= tokens
        if run:
            self._ends[i] = run[-1]
        else:
            del self._runs[i], self._ends[i], self._sums[i]

    def before(self, key: float) -> int:
        """Tokens of all entries that go before a newcomer with ``key``: those of smaller keys, and of the same."""
        i = bisect_right(self._ends, key, key=_key)
        if i == len(self._runs):
            return self.tokens
        run = self._runs[i]
        return sum(self._sums[:i]) + sum(p.tokens for p in run[: bisect_right(run, key, key=_key)])


class _Line:
    """Work that is served in the order of keys, and what comes in."""

    def __init__(self, ageing: float, work: WorkInOrder | None = None) -> None:
        self.work = WorkInOrder() if work is None else work
        self._ageing = ageing
        self._arrivals: dict[int, float] = {}  # tokens by bucket of the key on arrival
        self._arrivals_seconds = 0.0
        self._weight = 1.0  # of the next arrival: growing weights spare us shrinking those of all buckets
        self._arrived_at: float | None = None

    def forget_arrivals(self) -> None:
        """Begin anew to see what comes in."""
        self._arrivals, self._arrivals_seconds, self._weight, self._arrived_at = {}, 0.0, 1.0, None

    def arrive(self, key: float, tokens: int, now: float) -> None:
        last, self._arrived_at = self._arrived_at, now
        if last is None:
            return
        bucket = floor((key - now * self._ageing) / _BUCKET)
        self._weight /= 1 - 1 / _RELEASES
        if self._weight > _GREAT:
            self._arrivals_seconds /= self._weight
            self._arrivals = {b: t / self._weight for b, t in self._arrivals.items() if t > 1}
            self._weight = 1.0
        self._arrivals_seconds += self._weight * (now - last)
        self._arrivals[bucket] = self._arrivals.get(bucket, 0.0) + self._weight * tokens

    def wait_seconds(self, key: float, rate: float, now: float) -> float:
        """How long somebody who comes now with ``key`` would wait, at ``rate`` tokens per second.

        First goes what waits with smaller keys, and then whoever comes meanwhile and is still put before it: the work
        of each bucket comes in until its newcomers have the greater keys.
        """
        work = self.work.before(key)
        if not work:
            return 0.0
        overtaking: list[tuple[float, float]] = []  # until when, tokens per second
        if self._ageing > 0 and self._arrivals_seconds > 0:
            own = key - now * self._ageing
            for bucket, tokens in self._arrivals.items():
                until = (own - (bucket + 0.5) * _BUCKET) / self._ageing
                if until > 0:
                    overtaking.append((until, tokens / self._arrivals_seconds))
        overtaking.sort()
        spare = rate - sum(r for _, r in overtaking)
        began, left = 0.0, float(work)
        for until, arriving in overtaking:
            if spare > 0 and left <= spare * (until - began):
                break
            left -= spare * (until - began)
            spare += arriving
            began = until
        return began + left / spare if spare > 0 else inf


class Outflow:
    """One queue's work, its rate of release, and what comes in. All times are seconds, all work prompt tokens.

    Keys are those of the queue: smallest first, and growing by ``ageing`` with each second of arrival. They are the
    order inside a flow; between flows it is that of fair shares.
    """

    def __init__(self, ageing: float) -> None:
        self.releases = 0
        """Releases that ended a wait, all told."""
        self._ageing = ageing
        self._all = _Line(ageing)
        self._flows: dict[Flow, _Line] = {}  # those that wait; where only one does, its work is that of all
        self._counted_until = 0.0
        self._released_tokens = 0.0
        self._released_seconds = 0.0

    def __repr__(self) -> str:
        return f"<Outflow {len(self)} waiting, {self.tokens} tokens, {self.tokens_per_second} per second>"

    def __len__(self) -> int:
        return len(self._all.work)

    @property
    def tokens(self) -> int:
        return self._all.work.tokens

    @property
    def trusted(self) -> bool:
        """Whether enough has been seen to refuse anybody by it."""
        return self.releases >= _TRUSTED_RELEASES

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of release while somebody waits; ``None`` before anybody has."""
        return self._released_tokens / self._released_seconds if self._released_seconds > 0 else None

    def wait(self, key: float, number: int, tokens: int, now: float, flow: Flow = _ALIKE) -> None:
        if not self._all.work:
            self._counted_until = now
        work = self._all.work
        own = self._flows.get(flow)
        if own is None:
            for other in self._flows.values():
                if other.work is work:
                    other.work = work.copy()
            own = self._flows[flow] = _Line(self._ageing, None if self._flows else work)
        work.add(key, number, tokens)
        if own.work is not work:
            own.work.add(key, number, tokens)

    def arrive(self, key: float, tokens: int, now: float, flow: Flow = _ALIKE) -> None:
        """Note new work: how much comes in says how long those who can be overtaken will be."""
        self._all.arrive(key, tokens, now)
        if (own := self._flows.get(flow)) is not None:
            own.arrive(key, tokens, now)

    def bypass(self, key: float, tokens: int, now: float) -> None:
        """As ``wait``, ``arrive`` and ``release`` at once: it ends nobody's wait, but is work that has come in."""
        self._counted_until = now
        self._all.arrive(key, tokens, now)

    def begin_anew(self, now: float) -> None:
        """Forget what was seen: other engines serve all that waits from now on."""
        self.releases = 0
        self._counted_until, self._released_tokens, self._released_seconds = now, 0.0, 0.0
        for line in (self._all, *self._flows.values()):
            line.forget_arrivals()

    def resume(self, now: float) -> None:
        """Do not count the time until ``now``: an engine took nothing in it, and that says nothing of its rate."""
        self._counted_until = now

    def leave(self, key: float, number: int, tokens: int, flow: Flow = _ALIKE) -> None:
        """Note that somebody has gone without having been released."""
        work, own = self._all.work, self._flows[flow]
        work.remove(key, number, tokens)
        if own.work is not work:
            own.work.remove(key, number, tokens)
        if not own.work:
            del self._flows[flow]

    def release(self, key: float, number: int, tokens: int, now: float, flow: Flow = _ALIKE) -> None:
        self.leave(key, number, tokens, flow)
        elapsed = now - self._counted_until
        if elapsed <= 0 and not self._all.work:
            return  # it did not wait, and nobody else did
        keep = 1 - 1 / _RELEASES
        self._released_tokens = self._released_tokens * keep + tokens
        self._released_seconds = self._released_seconds * keep + max(0.0, elapsed)
        self._counted_until = now
        self.releases += 1

    def wait_seconds(self, key: float, now: float, flow: Flow = _ALIKE, share: float = 1.0) -> float | None:
        """How long somebody of ``flow`` who comes now with ``key`` would wait; ``None`` while nothing is known.

        Where several flows wait, a flow's work goes at its ``share`` of the rate at least, and other flows' work does
        not hold it up beyond that; so whoever would be in time by that is never taken for late. But a flow need not
        wait for its share either while others use less than theirs, so its wait is not longer than if all went by key.
        What a flow was served beyond its share before it waited, and the round in which each flow has its turn, are
        left out: the estimate is low then, and who is late after all is refused when the limit ends.
        """
        rate = self.tokens_per_second
        if rate is None:
            return None
        by_key = self._all.wait_seconds(key, rate, now)
        own = self._flows.get(flow)
        if own is None:
            return 0.0
        return by_key if len(self._flows) == 1 else min(by_key, own.wait_seconds(key, share * rate, now))
