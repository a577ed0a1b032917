"""Whether it pays to send an engine slices: only while it still has them cached when the next piece comes.

An engine whose KV cache is too small, or that evicts prefixes early, would do the work of every slice again.
"""

from __future__ import annotations

from math import inf

_WEIGHT = 0.1
_ENOUGH = 0.95
_JUDGED_SLICES = 10
"""Slices before which nothing is held against an engine: the first may meet a cache that is still full of others."""
_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 3600.0


class HitRate:
    """Of one engine; by its own account (``cached_tokens``)."""

    def __init__(self) -> None:
        self.rate = 1.0
        """Moving average of the share of what it should have had cached, by slices."""
        self._slices = 0
        self._paused_until = -inf
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def __repr__(self) -> str:
        return f"<HitRate {self.rate:.2f} of {self._slices} slices>"

    def pays(self, now: float) -> bool:
        """Whether to send it slices; after a pause it is tried again, after each failure later."""
        return now >= self._paused_until

    def note(self, held_tokens: int, found_tokens: int, now: float) -> None:
        """Take in that it found ``found_tokens`` of the ``held_tokens`` that slices had brought before."""
        if not held_tokens or not self.pays(now):
            return
        self._slices += 1
        self.rate += _WEIGHT * (min(1.0, found_tokens / held_tokens) - self.rate)
        if self._slices < _JUDGED_SLICES:
            return
        if self.rate >= _ENOUGH:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
            return
        self._paused_until = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        self.rate, self._slices = 1.0, 0
