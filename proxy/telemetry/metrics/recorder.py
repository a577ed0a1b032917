"""What is recorded: requests as they end, slices, decisions; and what is watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from proxy.core.actions import Dispatch, Slice
from proxy.core.events import Arrived, Ended, NotStarted, SliceEnded, TokensProduced
from proxy.core.request import Outcome
from proxy.telemetry.metrics.exposition import Snapshot, exposed
from proxy.telemetry.metrics.fleet import FleetCounts, watch_fleet
from proxy.telemetry.metrics.instruments import Instruments
from proxy.telemetry.metrics.live import Readings, watch_obstacles, watch_scheduler, watch_sizes
from proxy.telemetry.metrics.names import (
    DECISION_EDGES,
    DURATION_EDGES,
    LAG_EDGES,
    OTHER,
    QUEUE_EDGES,
    TBT_EDGES,
    TTFT_EDGES,
    Name,
)
from proxy.telemetry.metrics.pooled import TbtHistogram
from proxy.telemetry.metrics.served import Served, fared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from proxy.core.actions import Action
    from proxy.core.events import Event
    from proxy.core.fleet import Member
    from proxy.core.promptsize import PromptSizes
    from proxy.core.scheduler import Scheduler
    from proxy.telemetry.metrics.served import Fared
    from proxy.telemetry.report import RequestReport

_CAUSES: dict[type[Event] | None, str] = {
    Arrived: "arrival",
    TokensProduced: "step",
    Ended: "end",
    NotStarted: "turned_away",
    SliceEnded: "slice",
    None: "timer",
}
"""What made the scheduler release something: anything else tells of an engine, or of the settings."""
_ENGINE = "engine"
_RELEASED: dict[type[Action], str] = {Dispatch: "prompt", Slice: "slice"}
_GENAI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "class")


class Metrics:
    """The proxy's instruments; one per process, made by the application and handed to whoever records."""

    def __init__(
        self,
        scheduler: Scheduler,
        class_names: Iterable[str],
        tenant_names: Iterable[str] = (),
        sizes: PromptSizes | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._scheduler = scheduler
        self._tenant_names: frozenset[str] = frozenset()
        self._instruments = made = Instruments(self.registry)
        self._readings = Readings()
        self._engines: set[str] = set()
        """Those that have series of their own."""
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

        # Standard names where OpenTelemetry's GenAI conventions have one. A proxy is the GenAI server to its clients.
        self._duration = made.histograms(
            "gen_ai.server.request.duration", "Arrival to end of the answer", DURATION_EDGES, _GENAI
        )
        self._ttft = made.histograms(
            "gen_ai.server.time_to_first_token", "Arrival to first token, queue included", TTFT_EDGES, _GENAI
        )
        self._tpot = made.histograms("gen_ai.server.time_per_output_token", "Mean TBT of a request", TBT_EDGES, _GENAI)
        of_class = ("class",)
        self._tbt_max = made.histograms("slai.request.tbt.max", "Longest TBT of a request", TBT_EDGES, of_class)
        self._tbt_p99 = made.histograms(
            "slai.request.tbt.p99", "99th percentile of a request's TBT", TBT_EDGES, of_class
        )
        self._queue = made.histograms("slai.queue.duration", "Arrival to dispatch", QUEUE_EDGES, of_class)
        self._requests = made.counts("slai.requests", "Generation requests by outcome", ("class", "outcome"))
        self._reasons = made.counts("slai.failures", "Requests refused or failed, by reason", ("reason",))
        self._access = made.counts("slai.access.refusals", "Requests not let in, by reason", ("reason",))
        self._deadlines = made.counts(
            "slai.deadlines", "Deadlines that fell due, by kind: ttft or tbt", ("class", "kind")
        )
        self._misses = made.counts("slai.deadline.misses", "Deadlines missed, by kind: ttft or tbt", ("class", "kind"))
        self._tokens = made.counts(
            "slai.tokens", "Prompt and output tokens of completed requests", ("class", "direction")
        )
        self._tbt = made.pool(Name("slai.tbt", "Gaps between tokens of all streams", "s", of_class), TbtHistogram)
        self._readings.watch(
            Name("slai.tbt.breaches", "Tokens later than their deadline, by cause", labels=("class", "cause")),
            lambda: [((*of, why.value), n) for of, tbt in self._tbt.items() for why, n in tbt.causes.items()],
            counts=True,
        )

        self._by_engine = Served(made, "engine", ("engine", "model"))
        self._by_tenant = Served(made, "tenant", ("tenant",))
        self._tenant_requests = made.counts("slai.tenant.requests", "Requests by tenant", ("tenant", "outcome"))
        self._tenant_tokens = made.counts(
            "slai.tenant.tokens", "Tokens of completed requests by tenant", ("tenant", "direction")
        )

        self._slices = made.counts("slai.slices", "Slices of prompts sent ahead")
        self._slice_tokens = made.counts("slai.slice.tokens", "New prompt tokens in slices")
        self._slice_bytes = made.counts("slai.slice.bytes", "Bodies of slices", unit="By")
        self._slice_hits = made.counts(
            "slai.slice.prefix.tokens", "Prompt tokens before a slice, by whether it found them cached", ("cached",)
        )
        self._releases = made.counts(
            "slai.releases", "Prompts and slices released, by what made it the time for them", ("what", "cause")
        )
        self._decisions = made.histograms("slai.decision.duration", "Time for one decision", DECISION_EDGES)[()]
        lag = "Lateness of the event loop, each tenth of a second"
        self._lag = made.histograms("slai.loop.lag", lag, LAG_EDGES)[()]
        watch_scheduler(self._readings, scheduler)
        waiting = scheduler.ledger.backlog.classes
        self._readings.watch(
            Name("slai.queue.class.requests", "Requests that wait, by class", labels=of_class),
            lambda: [((name,), waiting[name]) for (name,) in self._tbt],
        )
        if sizes is not None:
            watch_sizes(self._readings, sizes, lambda model: self._known_model(model) != OTHER)
        self.know(class_names, tenant_names)

    def know(self, class_names: Iterable[str], tenant_names: Iterable[str]) -> None:
        """Take the names of classes and tenants that there are from now on; series of others stay."""
        self._tenant_names = frozenset(tenant_names)
        for name in class_names:  # so that the series exist before the first event
            self._tbt.setdefault((name,), TbtHistogram())
            for outcome in Outcome:
                self._requests[name, outcome.value] += 0
            for kind in ("ttft", "tbt"):
                self._misses[name, kind] += 0
                self._deadlines[name, kind] += 0

    def tbt(self, class_name: str) -> TbtHistogram:
        """The pooled TBT of a configured class."""
        return self._tbt[class_name,]

    def record(self, report: RequestReport) -> None:
        """Record a request that has ended."""
        name, model = report.request_class.name, self._known_model(report.model)
        outcome = report.outcome or Outcome.ENGINE_FAILED
        found = fared(report)
        trace = found.trace
        self._requests[name, outcome.value] += 1
        if report.reason is not None:
            self._reasons[report.reason,] += 1
        if found.waited is not None:
            self._queue[name,].observe(found.waited, trace)
        for kind, due, missed in found.due:
            self._deadlines[name, kind] += due
            self._misses[name, kind] += missed
        if found.gaps is not None:
            self._tbt[name,].exemplify(found.gap_max, trace)
        if report.engine_id is not None:
            self._engines.add(report.engine_id)
            self._by_engine.record((report.engine_id, model), found)
        if self._tenant_names:
            self._record_tenant(report, outcome, found)
        if not found.completed:
            return
        assert report.ended_at is not None
        labels = report.operation, "vllm", model, name
        self._duration[labels].observe(report.ended_at - report.arrived_at, trace)
        self._tokens[name, "input"] += report.prompt_tokens
        self._tokens[name, "output"] += report.output_tokens
        if found.ttft is not None:
            self._ttft[labels].observe(found.ttft, trace)
        if found.gap_mean is not None:
            self._tpot[labels].observe(found.gap_mean, trace)
            self._tbt_max[name,].observe(found.gap_max, trace)
            self._tbt_p99[name,].observe(report.times.gap_p99() or 0.0, trace)

    def _record_tenant(self, report: RequestReport, outcome: Outcome, found: Fared) -> None:
        tenant = report.tenant if report.tenant in self._tenant_names else OTHER
        self._tenant_requests[tenant, outcome.value] += 1
        self._by_tenant.record((tenant,), found)
        if found.completed:
            self._tenant_tokens[tenant, "input"] += report.prompt_tokens
            self._tenant_tokens[tenant, "output"] += report.output_tokens

    def record_access_refusal(self, reason: str) -> None:
        """Record a request that an API key, or the want of one, kept out."""
        self._access[str(reason),] += 1

    def record_decision(self, event: type[Event] | None, actions: list[Action], seconds: float | None) -> None:
        """Record what the scheduler made of an event (``None``: its timer), and how long that took if it was timed."""
        if seconds is not None:
            self._decisions.observe(seconds)
        for action in actions:
            if (what := _RELEASED.get(type(action))) is not None:
                self._releases[what, _CAUSES.get(event, _ENGINE)] += 1

    def record_lag(self, seconds: float) -> None:
        """Record how late the event loop was."""
        self._lag.observe(seconds)

    def record_slice(self, tokens: int, before: int, cached: int | None, size_bytes: int) -> None:
        """Record a slice of ``tokens`` new tokens after ``before`` others, of which the engine found ``cached``."""
        self._slices[()] += 1
        self._slice_bytes[()] += size_bytes
        self._slice_tokens[()] += tokens
        if before and cached is not None:
            hit = min(before, cached)
            self._slice_hits["yes",] += hit
            self._slice_hits["no",] += before - hit

    def watch(self, name: str, description: str, read: Callable[[], Mapping[str, float]], label: str) -> None:
        """Tell whenever somebody scrapes what has been counted, by the values of one ``label``."""
        told = Name(name, description, labels=(label,))
        self._readings.watch(told, lambda: [((of,), value) for of, value in read().items()], counts=True)

    def watch_gauge(self, name: str, description: str, read: Callable[[], float], unit: str = "") -> None:
        """Tell whenever somebody scrapes how large something is."""
        self._readings.watch(Name(name, description, unit), lambda: [((), read())])

    def watch_obstacles(self, now: Callable[[], float]) -> None:
        """Show what keeps those who wait from each engine; ``now``: the scheduler's clock."""
        watch_obstacles(self._readings, self._scheduler, now)

    def watch_sources(self, read: Callable[[], Iterable[tuple[str, bool, int]]]) -> None:
        """Show the sources of engines that ``read`` gives: name, whether it tells at present, engines known by it."""
        up = Name("slai.discovery.up", "1 if the source of engines tells at present", labels=("source",))
        engines = Name("slai.discovery.engines", "Engines that the source has told", labels=("source",))
        self._readings.watch(up, lambda: [((source,), tells) for source, tells, _ in read()])
        self._readings.watch(engines, lambda: [((source,), known) for source, _, known in read()])

    def watch_fleet(self, member: Member, counts: FleetCounts) -> None:
        """Show how the fleet fares of which ``member`` is one."""
        watch_fleet(self._readings, member, counts)

    def names(self) -> dict[str, Name]:
        """The metrics that are ours, by Prometheus' names without ``_total``."""
        return {name.prometheus: name for name in (*self._instruments.names, *self._readings.names())}

    def collect(self) -> Snapshot:
        """Return what all metrics are; to be called where the scheduler runs, but not to be told there."""
        self._forget_gone_engines()
        return Snapshot([*self._readings.collect()], self.registry)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return exposed(self.collect())[0]

    def _forget_gone_engines(self) -> None:
        """Drop the series of engines that are no more: where pods come and go there would be ever more."""
        for engine_id in self._engines - {engine.id for engine in self._scheduler.engines}:
            self._by_engine.forget(engine_id)
            self._engines.discard(engine_id)

    def _known_model(self, model: str) -> str:
        return model if any(model in e.models for e in self._scheduler.engines) else OTHER
