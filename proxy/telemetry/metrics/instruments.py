"""The instruments of one process: made once, under names that are noted, and cheap to find and to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from proxy.telemetry.metrics.names import Name
from proxy.telemetry.metrics.pooled import Made, Pool, PoolCollector, PooledHistogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry, Metric


class CountsCollector(Collector):
    """Exposes what only grows. The library's own counter takes a lock for each step."""

    def __init__(self, name: Name, counts: Pool[float]) -> None:
        self._name = name
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Give the one family."""
        yield self._name.family(self._counts.copy().items(), counts=True)  # the loop adds to them


class Instruments:
    """Makes instruments, and keeps the names of all that it has made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.names: list[Name] = []

    def counts(self, name: str, description: str, labels: tuple[str, ...] = (), unit: str = "") -> Pool[float]:
        """Make what only grows, one for each set of values of the labels."""
        counts = Pool(float)
        if not labels:
            counts[()] = 0.0
        self.registry.register(CountsCollector(self.note(Name(name, description, unit, labels)), counts))
        return counts

    def histograms(
        self, name: str, description: str, edges: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Pool[PooledHistogram]:
        """Make histograms of seconds, one for each set of values of the labels."""
        return self.pool(Name(name, description, "s", labels), lambda: PooledHistogram(edges))

    def pool(self, name: Name, make: Callable[[], Made]) -> Pool[Made]:
        """Make histograms of a kind."""
        pool = Pool(make)
        self.registry.register(PoolCollector(self.note(name), pool))
        return pool

    def note(self, name: Name) -> Name:
        """Keep the name of what is made elsewhere."""
        self.names.append(name)
        return name
