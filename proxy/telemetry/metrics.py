"""Every metric of the proxy: its name, unit and labels. Nothing else names one.

Instruments are OpenTelemetry's and are also exposed for Prometheus at ``/metrics``. Per request they cost a few
microseconds each; per token that would be half the price of relaying it, so the pooled TBT histogram counts in a
plain list and joins the others when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from proxy import __version__
from proxy.core.blame import Cause
from proxy.core.health import Condition
from proxy.core.request import Outcome
from proxy.core.stepmodel import StepCoefficients
from proxy.core.tbt import slack_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proxy.core.engine import EngineBelief
    from proxy.core.promptsize import PromptSizes, RateFit
    from proxy.core.scheduler import Scheduler
    from proxy.telemetry.report import RequestReport

_TTFT_EDGES = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TBT_EDGES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_QUEUE_EDGES = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_DURATION_EDGES = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)

OTHER = "other"
"""Label value that stands for whatever is not known beforehand: clients must not be able to make series."""


class TbtHistogram:
    """Counts of gaps between tokens for one class; as cheap as a list index."""

    __slots__ = ("causes", "counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_TBT_EDGES) + 1)
        self.sum = 0.0
        self.causes = dict.fromkeys(Cause, 0)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_TBT_EDGES, seconds)] += 1
        self.sum += seconds

    def blame(self, cause: Cause) -> None:
        """Count why a gap was longer than its deadline."""
        self.causes[cause] += 1


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
        self._tbt: dict[str, TbtHistogram] = {}
        self._tenant_names: frozenset[str] = frozenset()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self.registry)
        self._provider = MeterProvider(
            [reader], resource=Resource.create({"service.name": "slai-proxy", "service.version": __version__})
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(_TbtCollector(self._tbt))
        self._meter = meter = self._provider.get_meter("slai-proxy", __version__)

        def histogram(name: str, description: str, edges: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=edges
            )

        # Standard names where OpenTelemetry's GenAI conventions have one. A proxy is the GenAI server to its clients.
        self._duration = histogram("gen_ai.server.request.duration", "Arrival to end of the answer", _DURATION_EDGES)
        self._ttft = histogram(
            "gen_ai.server.time_to_first_token", "Arrival to first token, queue included", _TTFT_EDGES
        )
        self._tpot = histogram("gen_ai.server.time_per_output_token", "Mean TBT of a request", _TBT_EDGES)
        self._tbt_max = histogram("slai.request.tbt.max", "Longest TBT of a request", _TBT_EDGES)
        self._tbt_p99 = histogram("slai.request.tbt.p99", "99th percentile of a request's TBT", _TBT_EDGES)
        self._queue = histogram("slai.queue.duration", "Arrival to dispatch", _QUEUE_EDGES)
        self._requests = meter.create_counter("slai.requests", description="Generation requests by outcome")
        self._reasons = meter.create_counter("slai.failures", description="Requests refused or failed, by reason")
        self._access = meter.create_counter("slai.access.refusals", description="Requests not let in, by reason")
        self._misses = meter.create_counter(
            "slai.deadline.misses", description="Deadlines missed, by kind: ttft or tbt"
        )
        self._slices = meter.create_counter("slai.slices", description="Slices of prompts sent ahead")
        self._slice_tokens = meter.create_counter("slai.slice.tokens", description="New prompt tokens in slices")
        self._slice_bytes = meter.create_counter("slai.slice.bytes", description="Bodies of slices", unit="By")
        self._slice_hits = meter.create_counter(
            "slai.slice.prefix.tokens", description="Prompt tokens before a slice, by whether it found them cached"
        )
        self._tokens = meter.create_counter("slai.tokens", description="Prompt and output tokens of ended requests")
        self._tenant_ttft = histogram("slai.tenant.time_to_first_token", "TTFT by named tenant", _TTFT_EDGES)
        self._tenant_requests = meter.create_counter("slai.tenant.requests", description="Requests by named tenant")
        self._tenant_tokens = meter.create_counter("slai.tenant.tokens", description="Tokens by named tenant")
        self._declare_gauges(meter)
        if sizes is not None:
            self._declare_size_gauges(meter, sizes)
        self.know(class_names, tenant_names)

    def know(self, class_names: Iterable[str], tenant_names: Iterable[str]) -> None:
        """Take the names of classes and tenants that there are from now on; series of others stay."""
        self._tenant_names = frozenset(tenant_names)
        for name in class_names:  # so that the series exist before the first event
            self._tbt.setdefault(name, TbtHistogram())
            for outcome in Outcome:
                self._requests.add(0, {"class": name, "outcome": outcome.value})
            for kind in ("ttft", "tbt"):
                self._misses.add(0, {"class": name, "kind": kind})

    def tbt(self, class_name: str) -> TbtHistogram:
        """The pooled TBT of a configured class."""
        return self._tbt[class_name]

    def record(self, report: RequestReport) -> None:
        """Record a request that has ended."""
        name = report.request_class.name
        kind = {"class": name}
        outcome = report.outcome or Outcome.ENGINE_FAILED
        self._requests.add(1, {**kind, "outcome": outcome.value})
        self._record_tenant(report, outcome)
        if report.reason is not None:
            self._reasons.add(1, {"reason": report.reason})
        if report.queue_seconds is not None:
            self._queue.record(report.queue_seconds, kind)
        if report.missed_ttft:
            self._misses.add(1, {**kind, "kind": "ttft"})
        times = report.times
        if times.misses:
            self._misses.add(times.misses, {**kind, "kind": "tbt"})
        if outcome is not Outcome.COMPLETED or report.ended_at is None:
            return
        labels = {
            "gen_ai.operation.name": report.operation,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": self._known_model(report.model),
            **kind,
        }
        self._duration.record(report.ended_at - report.arrived_at, labels)
        self._tokens.add(report.prompt_tokens, {"direction": "input", **kind})
        self._tokens.add(report.output_tokens, {"direction": "output", **kind})
        if report.ttft_seconds is not None:
            self._ttft.record(report.ttft_seconds, labels)
        if (mean := times.gap_mean()) is not None:
            self._tpot.record(mean, labels)
            self._tbt_max.record(times.gap_max, kind)
            self._tbt_p99.record(times.gap_p99() or 0.0, kind)

    def _record_tenant(self, report: RequestReport, outcome: Outcome) -> None:
        if not self._tenant_names:
            return  # four measurements that would tell nothing
        tenant = {"tenant": report.tenant if report.tenant in self._tenant_names else OTHER}
        self._tenant_requests.add(1, {**tenant, "outcome": outcome.value})
        if outcome is Outcome.COMPLETED and report.ended_at is not None:
            self._tenant_tokens.add(report.prompt_tokens, {"direction": "input", **tenant})
            self._tenant_tokens.add(report.output_tokens, {"direction": "output", **tenant})
            if report.ttft_seconds is not None:
                self._tenant_ttft.record(report.ttft_seconds, tenant)

    def record_access_refusal(self, reason: str) -> None:
        """Record a request that an API key, or the want of one, kept out."""
        self._access.add(1, {"reason": str(reason)})

    def watch(self, name: str, description: str, read: Callable[[], Mapping[str, float]], label: str) -> None:
        """Tell whenever somebody scrapes what has been counted, by the values of one ``label``."""

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            return (Observation(value, {label: of}) for of, value in read().items())

        self._meter.create_observable_counter(name, [observe], description=description)

    def watch_gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Tell whenever somebody scrapes how large something is."""
        self._meter.create_observable_gauge(name, [lambda _: [Observation(read())]], description=description)

    def record_slice(self, tokens: int, before: int, cached: int | None, size_bytes: int) -> None:
        """Record a slice of ``tokens`` new tokens after ``before`` others, of which the engine found ``cached``."""
        self._slices.add(1)
        self._slice_bytes.add(size_bytes)
        self._slice_tokens.add(tokens)
        if before and cached is not None:
            hit = min(before, cached)
            self._slice_hits.add(hit, {"cached": "yes"})
            self._slice_hits.add(before - hit, {"cached": "no"})

    def watch_sources(self, read: Callable[[], Iterable[tuple[str, bool, int]]]) -> None:
        """Show the sources of engines that ``read`` gives: name, whether it tells at present, engines known by it."""
        meter = self._provider.get_meter("slai-proxy", __version__)

        def gauge(name: str, description: str, position: int) -> None:
            def observe(_: CallbackOptions) -> Iterator[Observation]:
                return (Observation(int(told[position]), {"source": told[0]}) for told in read())

            meter.create_observable_gauge(name, [observe], description=description)

        gauge("slai.discovery.up", "1 if the source of engines tells at present", 1)
        gauge("slai.discovery.engines", "Engines that the source has told", 2)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def close(self) -> None:
        self._provider.shutdown()

    def _known_model(self, model: str) -> str:
        return model if any(model in e.models for e in self._scheduler.engines) else OTHER

    def _declare_gauges(self, meter: Any) -> None:
        scheduler = self._scheduler

        def gauge(name: str, description: str, read: Callable[[], float], unit: str = "") -> None:
            meter.create_observable_gauge(name, [lambda _: [Observation(read())]], unit=unit, description=description)

        def engine_gauge(
            name: str, description: str, read: Callable[[EngineBelief], float | None], unit: str = ""
        ) -> None:
            def observe(_: CallbackOptions) -> Iterator[Observation]:
                found = ((engine.id, read(engine)) for engine in scheduler.engines)
                return (Observation(value, {"engine": name}) for name, value in found if value is not None)

            meter.create_observable_gauge(name, [observe], unit=unit, description=description)

        gauge("slai.queue.requests", "Requests that wait", lambda: scheduler.waiting)
        gauge("slai.queue.tokens", "Prompt tokens that wait", lambda: scheduler.waiting_tokens)
        gauge(
            "slai.queue.outflow.rate",
            "Tokens released per second while some wait",
            lambda: scheduler.outflow_tokens_per_second,
        )
        meter.create_observable_counter(
            "slai.release.harmful",
            [lambda _: [Observation(scheduler.harmful_releases)]],
            description="Prompts released although they were to overrun a TBT deadline (policy slai)",
        )
        gauge("slai.queue.size", "Bodies of waiting requests", lambda: scheduler.waiting_bytes, "By")
        engine_gauge("slai.engine.up", "1 if the engine gets requests", lambda e: e.up)
        engine_gauge("slai.engine.leaving", "1 if removed, and not yet done with what it has", lambda e: e.leaving)
        engine_gauge("slai.engine.generation", "Number of its joining, of all", lambda e: e.number)
        engine_gauge(
            "slai.engine.ejections", "Times it was left alone, as it failed too often", attrgetter("health.ejections")
        )
        engine_gauge("slai.engine.stalls", "Times it gave no token for too long", attrgetter("health.stalls"))
        engine_gauge("slai.engine.restarts", "Times it started anew unseen", lambda e: e.restarts)
        meter.create_observable_gauge(
            "slai.engine.condition",
            [
                lambda _: [
                    Observation(int(e.health.condition is c), {"engine": e.id, "condition": c.value})
                    for e in scheduler.engines
                    for c in Condition
                ]
            ],
            description="1 for the condition that it is in",
        )
        meter.create_observable_gauge(
            "slai.engine.plugin",
            [
                lambda _: [
                    Observation(1, {"engine": e.id, "policy": e.plugin.value})
                    for e in scheduler.engines
                    if e.plugin is not None
                ]
            ],
            description="1 for the policy by which its own scheduler goes, where that is our plugin",
        )
        engine_gauge("slai.engine.requests", "Requests dispatched and not over", lambda e: e.outstanding)
        engine_gauge("slai.engine.passing", "Requests past the queue (no generation)", lambda e: e.passing)
        engine_gauge("slai.engine.decodes", "Streams past their first token", lambda e: e.decodes)
        engine_gauge("slai.engine.backlog.tokens", "Released prompt tokens not worked on yet", lambda e: e.backlog)
        engine_gauge("slai.engine.kv.tokens", "KV cache in use, as we count it", lambda e: e.kv_tokens)
        engine_gauge("slai.engine.kv.capacity.tokens", "KV cache; 0 unknown", lambda e: e.limits.kv_tokens or 0)
        prefixes = scheduler.prefixes
        engine_gauge(
            "slai.engine.prefix.tokens", "Prompt tokens believed cached by it", lambda e: prefixes.index(e.id).tokens
        )
        engine_gauge(
            "slai.engine.prefix.trust", "Share of them that it finds, 1 unheard", lambda e: prefixes.index(e.id).trust
        )
        engine_gauge(
            "slai.engine.kv.error.tokens", "KV cache in use beyond our count, by its own", lambda e: e.reports.kv_error
        )
        engine_gauge("slai.engine.kv.caution", "Share kept free after preemptions", lambda e: e.reports.caution)
        engine_gauge("slai.engine.slice.hit_rate", "Share of earlier slices found cached", lambda e: e.hit_rate.rate)
        engine_gauge("slai.engine.foreign.requests", "Sequences that others run on it", lambda e: e.reports.foreign)
        engine_gauge("slai.engine.step.duration", "Usual engine step, as we see it", lambda e: e.step_seconds, "s")
        engine_gauge("slai.engine.feedback.duration", "From release to a step", attrgetter("delay.seconds"), "s")
        engine_gauge("slai.engine.tbt.slack", "Strictest TBT deadline less step and p95 error", slack_seconds, "s")
        engine_gauge("slai.engine.steps.ahead", "Steps that it composes in advance", attrgetter("delay.steps"))
        engine_gauge(
            "slai.engine.step.model.steps", "Steps seen that the step model was fitted to", lambda e: e.model.steps
        )
        engine_gauge("slai.engine.step.model.trusted", "1 once the step model is used", lambda e: e.model.trusted)
        for kind in ("prompt", "decode"):
            errors, of = f"slai.engine.step.model.{kind}.error", f"model.{kind}_errors"
            engine_gauge(f"{errors}.mean", f"Mean error, share of prediction, {kind}", attrgetter(f"{of}.mean"))
            for rank in ("p95", "p99"):
                engine_gauge(
                    f"{errors}.{rank}", f"{rank} beyond prediction, share of it, {kind}", attrgetter(f"{of}.{rank}")
                )
        for name in (f.name for f in fields(StepCoefficients)):
            term = attrgetter(f"model.coefficients.{name}")
            engine_gauge(f"slai.engine.step.model.{name}", f"Step model: seconds, {name.replace('_', ' ')}", term, "s")

    def _declare_size_gauges(self, meter: Any, sizes: PromptSizes) -> None:
        def gauge(
            name: str, description: str, read: Callable[[RateFit], Iterable[tuple[float, dict[str, str]]]]
        ) -> None:
            def observe(_: CallbackOptions) -> Iterator[Observation]:
                for model, fit in sizes:
                    if (known := self._known_model(model)) != OTHER:
                        for value, labels in read(fit):
                            yield Observation(value, {"model": known, **labels})

            meter.create_observable_gauge(name, [observe], description=description)

        gauge(
            "slai.prompt.bytes_per_token",
            "Bytes of text that make a token, as learnt from usage",
            lambda fit: [
                (1 / fit.rates.per_ascii_byte, {"script": "ascii"}),
                (1 / fit.rates.per_other_byte, {"script": "other"}),
            ],
        )
        gauge(
            "slai.prompt.estimate.error",
            "Mean error of estimated prompt lengths, as a share",
            lambda fit: [(fit.error, {})],
        )


class _TbtCollector(Collector):
    def __init__(self, histograms: dict[str, TbtHistogram]) -> None:
        self._histograms = histograms

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        family = HistogramMetricFamily("slai_tbt_seconds", "Gaps between tokens of all streams", labels=["class"])
        for name, histogram in self._histograms.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for edge, count in zip((*map(str, _TBT_EDGES), "+Inf"), histogram.counts, strict=True):
                total += count
                buckets.append((edge, total))
            family.add_metric([name], buckets, sum_value=histogram.sum)
        yield family
        late = CounterMetricFamily(
            "slai_tbt_breaches", "Tokens later than their deadline, by cause", labels=["class", "cause"]
        )
        for name, histogram in self._histograms.items():
            for cause, count in histogram.causes.items():
                late.add_metric([name, cause], count)
        yield late
