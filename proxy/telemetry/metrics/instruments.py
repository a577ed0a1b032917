"""The instruments of one process: made once, under names that are noted, and cheap to find and to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter

from proxy.telemetry.metrics.names import Name
from proxy.telemetry.metrics.pooled import Pool, PoolCollector, Pooled, PooledHistogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry


class Counters(dict[tuple[str, ...], Counter]):
    """Counters by the values of their labels, each made when it is first asked for.

    The library finds one by making strings of all values and taking a lock, and a request asks for half a dozen.
    """

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __missing__(self, labels: tuple[str, ...]) -> Counter:
        made = self[labels] = self._counter.labels(*labels)
        return made

    def forget(self, label: str, value: str) -> None:
        """Show no more of those of which a label has this value."""
        self._counter.remove_by_labels({label: value})
        self.clear()


class Instruments:
    """Makes instruments, and keeps the names of all that it has made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.names: list[Name] = []

    def counter(self, name: str, description: str, unit: str = "") -> Counter:
        """Make what only grows."""
        made = self.note(Name(name, description, unit))
        return Counter(made.prometheus, description, registry=self.registry)

    def counters(self, name: str, description: str, labels: tuple[str, ...]) -> Counters:
        """Make some, one for each set of values of the labels."""
        made = self.note(Name(name, description, labels=labels))
        return Counters(Counter(made.prometheus, description, made.prometheus_labels, registry=self.registry))

    def histograms(
        self, name: str, description: str, edges: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Pool[PooledHistogram]:
        """Make histograms of seconds, one for each set of values of the labels."""
        return self.pool(Name(name, description, "s", labels), lambda: PooledHistogram(edges))

    def pool(self, name: Name, make: Callable[[], Pooled]) -> Pool[Pooled]:
        """Make histograms of a kind."""
        pool = Pool(make)
        self.registry.register(PoolCollector(self.note(name), pool))
        return pool

    def note(self, name: Name) -> Name:
        """Keep the name of what is made elsewhere."""
        self.names.append(name)
        return name
