"""Metrics as Prometheus reads them."""

from dataclasses import fields
from typing import Any, ClassVar

import pytest
from builders import make_limits, make_request
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.actions import Dispatch
from proxy.core.events import Arrived, Ended, EngineRemoved, EngineReported, EngineUp, TokensProduced
from proxy.core.request import Outcome, RejectReason, RequestClass
from proxy.core.scheduler import Scheduler
from proxy.core.selfreport import EngineReport
from proxy.core.stepmodel import PRIOR, StepCoefficients, StepLoad
from proxy.telemetry.metrics import OTHER, Metrics, exposed
from proxy.telemetry.report import RequestReport, TokenTimes

GOLD = RequestClass("gold", ttft_seconds=1.0, tbt_seconds=0.1)


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler = Scheduler()
    scheduler.handle(EngineUp("http://e0", make_limits(kv_tokens=1000), frozenset({"tiny"})), 0.0)
    return scheduler


@pytest.fixture
def metrics(scheduler: Scheduler) -> Metrics:
    return Metrics(scheduler, ["gold", "bulk"])


def ended(outcome: Outcome | None = Outcome.COMPLETED, **fields: Any) -> RequestReport:
    """A request of class gold that arrived at 10, went out at 10.5 and had tokens at 11.5, 11.6 and 12."""
    report = RequestReport("1-x", "x", "chat", 10.0, GOLD, model="tiny", prompt_tokens=7)
    report.dispatched_at, report.ended_at, report.outcome = 10.5, 12.25, outcome
    report.times = TokenTimes(GOLD.tbt_seconds)
    for now in (11.5, 11.6, 12.0):
        report.times.on_read(now, 1)
    for name, value in fields.items():
        setattr(report, name, value)
    return report


def read(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Samples by name and then by labels, e.g. ``{"up": {"engine=e0": 1.0}}``."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


GENAI = "class=gold,gen_ai_operation_name=chat,gen_ai_provider_name=vllm,gen_ai_request_model=tiny"


def test_a_completed_request(metrics: Metrics) -> None:
    metrics.record(ended(completion_tokens=5))
    found = read(metrics)
    assert found["slai_requests_total"]["class=gold,outcome=completed"] == 1
    assert found["gen_ai_server_request_duration_seconds_sum"] == {GENAI: 2.25}
    assert found["gen_ai_server_time_to_first_token_seconds_sum"] == {GENAI: 1.5}
    assert found["gen_ai_server_time_per_output_token_seconds_sum"] == {GENAI: pytest.approx(0.25)}
    assert found["slai_request_tbt_max_seconds_sum"] == {"class=gold": pytest.approx(0.4)}
    assert found["slai_request_tbt_p99_seconds_sum"] == {"class=gold": pytest.approx(0.4)}
    assert found["slai_queue_duration_seconds_sum"] == {"class=gold": 0.5}
    assert found["slai_tokens_total"] == {"class=gold,direction=input": 7, "class=gold,direction=output": 5}
    misses = found["slai_deadline_misses_total"]
    assert (misses["class=gold,kind=ttft"], misses["class=gold,kind=tbt"]) == (1, 1)
    assert "slai_failures_total" not in found


def test_output_tokens_are_counted_by_chunks_where_the_engine_does_not_tell(metrics: Metrics) -> None:
    metrics.record(ended())
    assert read(metrics)["slai_tokens_total"]["class=gold,direction=output"] == 3


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.COMPLETED])
def test_only_completed_requests_make_latencies(metrics: Metrics, outcome: Outcome) -> None:
    """Otherwise clients that leave, and engines that fail fast, would make the figures look better than they are."""
    metrics.record(ended(outcome, reason="engine_500"))
    found = read(metrics)
    assert found["slai_requests_total"][f"class=gold,outcome={outcome}"] == 1
    assert sum(found["slai_requests_total"].values()) == 1
    assert found["slai_failures_total"] == {"reason=engine_500": 1}
    assert not [name for name in found if name.startswith("gen_ai_") or "tbt_max" in name or "slai_tokens" in name]
    assert found["slai_deadline_misses_total"]["class=gold,kind=tbt"] == 1, "a miss has happened, however it ended"


def test_a_request_without_an_outcome_is_counted_as_a_failure(metrics: Metrics) -> None:
    metrics.record(ended(None))
    assert read(metrics)["slai_requests_total"]["class=gold,outcome=engine_failed"] == 1


def test_an_answer_in_one_piece_has_no_ttft_and_no_tbt(metrics: Metrics) -> None:
    metrics.record(ended(times=TokenTimes(0.1), completion_tokens=40))
    found = read(metrics)
    assert found["gen_ai_server_request_duration_seconds_count"] == {GENAI: 1}
    assert not [name for name in found if "first_token" in name or "per_output_token" in name or "tbt_max" in name]


def test_series_exist_before_the_first_request(metrics: Metrics) -> None:
    found = read(metrics)
    assert len(found["slai_requests_total"]) == 2 * len(Outcome)
    assert set(found["slai_deadline_misses_total"].values()) == {0.0}
    assert found["slai_tbt_seconds_count"] == {"class=gold": 0, "class=bulk": 0}


def test_names_that_clients_make_up_make_no_series(metrics: Metrics) -> None:
    for number in range(10_000):
        metrics.record(ended(model=f"model-{number}", client_id=str(number), request_id=str(number)))
    metrics.record(ended())
    found = read(metrics)
    counts = found["gen_ai_server_request_duration_seconds_count"]
    assert counts == {GENAI: 1, GENAI.replace("tiny", OTHER): 10_000}
    assert sum(map(len, found.values())) < 400
    assert len(metrics.exposition()) < 64 * 1024


def test_ten_thousand_tenants_and_models_make_one_series_more(scheduler: Scheduler) -> None:
    """Beside those that the settings and the engines name; all of them in fewer bytes than a page has."""
    metrics = Metrics(scheduler, ["gold", "bulk"], ["acme"])
    metrics.record(ended(engine_id="http://e0", tenant="acme"))
    metrics.record(ended(engine_id="http://e0", tenant="nobody", model="none"))
    before = {name: set(series) for name, series in read(metrics).items()}
    for number in range(10_000):
        tenant, model = f"key:{number:x}", f"model-{number}"
        metrics.record(ended(engine_id="http://e0", tenant=tenant, model=model, request_id=str(number)))
    found = read(metrics)
    assert {name: set(series) for name, series in found.items()} == before
    assert found["slai_tenant_requests_total"] == {
        "outcome=completed,tenant=acme": 1,
        "outcome=completed,tenant=other": 10_001,
    }
    assert found["slai_engine_time_to_first_token_seconds_count"] == {
        "engine=http://e0,model=tiny": 1,
        f"engine=http://e0,model={OTHER}": 10_001,
    }
    assert sum(map(len, found.values())) < 1_000


def test_engines_that_come_and_go_leave_no_series(scheduler: Scheduler, metrics: Metrics) -> None:
    """Where pods come and go there would be ever more."""
    metrics.record(ended(engine_id="http://e0"))
    before = {name: set(series) for name, series in read(metrics).items()}
    for number in range(20):
        pod = f"http://pod-{number}"
        scheduler.handle(EngineUp(pod, make_limits(), frozenset({"tiny"})), 0.0)
        metrics.record(ended(engine_id=pod))
        assert read(metrics)["slai_engine_tbt_seconds_count"][f"engine={pod},model=tiny"] == 2
        scheduler.handle(EngineRemoved(pod, 0.0), 0.0)
        metrics.record(ended(engine_id=pod))
    assert {name: set(series) for name, series in read(metrics).items()} == before


def test_how_requests_fared_by_engine_and_by_tenant(scheduler: Scheduler) -> None:
    metrics = Metrics(scheduler, ["gold", "bulk"], ["acme"])
    metrics.record(ended(engine_id="http://e0", tenant="acme"))
    found = read(metrics)
    for of, labels in (("engine", "engine=http://e0,model=tiny"), ("tenant", "tenant=acme")):
        prefix = f"slai_{of}"
        assert found[f"{prefix}_time_to_first_token_seconds_sum"] == {labels: 1.5}
        assert found[f"{prefix}_time_per_output_token_seconds_sum"] == {labels: pytest.approx(0.25)}
        assert found[f"{prefix}_queue_duration_seconds_sum"] == {labels: 0.5}
        assert found[f"{prefix}_tbt_seconds_sum"] == {labels: pytest.approx(0.5)}
        buckets = {k.split("le=")[1].split(",")[0]: n for k, n in found[f"{prefix}_tbt_seconds_bucket"].items()}
        assert (buckets["0.075"], buckets["0.1"], buckets["0.4"]) == (0, 1, 2), (
            "a gap of just an edge's length is in it"
        )
        by_kind = {label.split("kind=")[1].split(",")[0]: n for label, n in found[f"{prefix}_deadlines_total"].items()}
        assert by_kind == {"ttft": 1, "tbt": 2}
        missed = found[f"{prefix}_deadline_misses_total"].values()
        assert sorted(missed) == [1, 1]


def test_deadlines_that_fell_due_are_those_that_could_be_missed(metrics: Metrics) -> None:
    metrics.record(ended())
    metrics.record(ended(Outcome.REJECTED, times=TokenTimes(), dispatched_at=None))
    metrics.record(ended(request_class=RequestClass("bulk"), times=TokenTimes(None)))
    due = read(metrics)["slai_deadlines_total"]
    assert {labels: n for labels, n in due.items() if n} == {"class=gold,kind=ttft": 1, "class=gold,kind=tbt": 2}


class Traced:
    exemplar: ClassVar = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}


def test_openmetrics_leads_from_a_bucket_to_a_trace(metrics: Metrics) -> None:
    metrics.record(ended(trace=Traced()))
    metrics.record(ended())
    text, content_type = exposed(metrics.collect(), "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    exemplars = {
        (family.name, sample.labels["le"]): (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in openmetrics_families(text.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
    trace = Traced.exemplar["trace_id"]
    assert exemplars["gen_ai_server_time_to_first_token_seconds", "2.0"] == (trace, 1.5)
    assert exemplars["slai_queue_duration_seconds", "0.5"] == (trace, 0.5)
    assert exemplars["slai_tbt_seconds", "0.5"] == (trace, pytest.approx(0.4)), "the longest gap of the stream"
    classic, content_type = exposed(metrics.collect(), "text/plain")
    assert content_type.startswith("text/plain")
    assert b"trace_id" not in classic


def test_decisions_are_timed_and_releases_counted_by_what_made_it_the_time(metrics: Metrics) -> None:
    metrics.record_decision(Arrived, [Dispatch("a", "http://e0")], 0.0002)
    metrics.record_decision(TokensProduced, [Dispatch("b", "http://e0")], None)
    metrics.record_decision(EngineUp, [Dispatch("c", "http://e0")], 0.0002)
    metrics.record_decision(None, [], 0.0002)
    found = read(metrics)
    assert found["slai_releases_total"] == {
        "cause=arrival,what=prompt": 1,
        "cause=step,what=prompt": 1,
        "cause=engine,what=prompt": 1,
    }
    assert found["slai_decision_duration_seconds_count"] == {"": 3}


def test_deadlines_of_one_request_do_not_make_a_class(metrics: Metrics) -> None:
    metrics.record(ended(request_class=RequestClass("gold", 0.123, 0.456)))
    assert {labels.partition(",")[0] for labels in read(metrics)["slai_requests_total"]} == {"class=gold", "class=bulk"}


def test_the_pooled_tbt_histogram(metrics: Metrics) -> None:
    for gap in (0.004, 0.005, 0.0051, 0.3, 11.0):
        metrics.tbt("gold").observe(gap)
    found = read(metrics)
    buckets = {labels.split("le=")[1]: n for labels, n in found["slai_tbt_seconds_bucket"].items() if "gold" in labels}
    assert buckets["0.005"] == 2, "an edge belongs to its own bucket, as Prometheus has it"
    assert buckets["0.01"] == 3
    assert buckets["0.3"] == 4
    assert buckets["10.0"] == 4
    assert buckets["+Inf"] == 5
    assert [*buckets.values()] == sorted(buckets.values())
    assert found["slai_tbt_seconds_count"]["class=gold"] == 5
    assert found["slai_tbt_seconds_sum"]["class=gold"] == pytest.approx(11.3141)
    assert found["slai_tbt_seconds_count"]["class=bulk"] == 0


def test_gauges_show_the_scheduler_at_the_time_of_the_scrape(scheduler: Scheduler, metrics: Metrics) -> None:
    scheduler.handle(EngineUp("http://e0", make_limits(max_num_seqs=1, kv_tokens=1000)), 0.0)
    scheduler.handle(Arrived(make_request("a", 300)), 0.0)
    scheduler.handle(TokensProduced("a"), 0.1)
    scheduler.handle(Arrived(make_request("b", 20, size_bytes=90)), 0.2)
    for preemptions in range(3):
        scheduler.handle(EngineReported("http://e0", EngineReport(3, 1, 0.5, preemptions)), 0.2)
    found = read(metrics)
    engine = "engine=http://e0"
    assert found["slai_queue_requests"] == {"": 1}
    assert found["slai_queue_tokens"] == {"": 20}
    assert found["slai_queue_size_bytes"] == {"": 90}
    assert found["slai_engine_up"] == {engine: 1}
    assert found["slai_engine_requests"] == {engine: 1}
    assert found["slai_engine_decodes"] == {engine: 1}
    assert found["slai_engine_backlog_tokens"] == {engine: 0}
    assert found["slai_engine_kv_tokens"] == {engine: 301}
    assert found["slai_engine_kv_capacity_tokens"] == {engine: 1000}
    assert found["slai_engine_step_duration_seconds"][engine] > 0
    assert found["slai_engine_feedback_duration_seconds"] == {engine: 0.005}
    assert found["slai_engine_steps_ahead"] == {engine: 0}
    assert found["slai_engine_tbt_slack_seconds"][engine] < 0.5
    assert found["slai_engine_kv_error_tokens"][engine] > 50
    assert found["slai_engine_kv_caution"] == {engine: 0.02}
    assert found["slai_engine_foreign_requests"] == {engine: 3}
    assert found["slai_engine_reported_running"] == {engine: 3}
    assert found["slai_engine_reported_waiting"] == {engine: 1}
    assert found["slai_engine_reported_kv_usage"] == {engine: 0.5}


def test_without_a_deadline_in_flight_there_is_no_slack(metrics: Metrics) -> None:
    assert "slai_engine_tbt_slack_seconds" not in read(metrics)


def test_the_step_model_is_shown(scheduler: Scheduler, metrics: Metrics) -> None:
    model, engine = scheduler.engines[0].model, "engine=http://e0"
    prefix = "slai_engine_step_model_"
    assert read(metrics)[f"{prefix}trusted"] == {engine: 0}
    for number in range(800):
        model.observe(StepLoad(500 * (number % 2), 10, 1000, 0.0, number % 2), 0.02 + 0.05 * (number % 2))
    found = read(metrics)
    assert found[f"{prefix}steps"] == {engine: 800}
    assert found[f"{prefix}trusted"] == {engine: 1}
    for kind, errors in (("prompt", model.prompt_errors), ("decode", model.decode_errors)):
        assert found[f"{prefix}{kind}_error_mean"] == {engine: errors.mean}
        assert found[f"{prefix}{kind}_error_p95"] == {engine: errors.p95}
        assert found[f"{prefix}{kind}_error_p99"] == {engine: errors.p99}
    coefficients = {name: found[f"{prefix}{name}_seconds"][engine] for name in (f.name for f in fields(PRIOR))}
    assert StepCoefficients(**coefficients) == model.coefficients
    assert coefficients["per_prefill_token"] > 0


def test_the_process_itself_is_shown_too(metrics: Metrics) -> None:
    found = read(metrics)
    assert found["process_resident_memory_bytes"][""] > 1e6
    assert "python_info" in found


def test_two_proxies_in_one_process_do_not_share_their_figures(scheduler: Scheduler, metrics: Metrics) -> None:
    other = Metrics(scheduler, ["gold", "bulk"])
    metrics.record(ended())
    assert read(other)["slai_requests_total"]["class=gold,outcome=completed"] == 0


def test_refusals_are_told_apart_by_reason(metrics: Metrics) -> None:
    for reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_FULL, RejectReason.DRAINING):
        metrics.record(ended(Outcome.REJECTED, reason=str(reason), dispatched_at=None))
    found = read(metrics)
    assert found["slai_failures_total"] == {"reason=queue_full": 2, "reason=draining": 1}
    assert "slai_queue_duration_seconds_count" not in found, "what was never dispatched has no time of dispatch"


def test_what_waits_why_and_who_went_first(scheduler: Scheduler, metrics: Metrics) -> None:
    metrics.watch_obstacles(lambda: 0.3)
    scheduler.handle(EngineUp("http://e0", make_limits(max_num_seqs=1, kv_tokens=1000)), 0.0)
    scheduler.handle(Arrived(make_request("a", 300)), 0.0)
    scheduler.handle(TokensProduced("a"), 0.1)
    assert set(read(metrics)["slai_engine_obstacle"].values()) == {0}, "nobody waits"
    scheduler.handle(Arrived(make_request("b", 200, request_class=RequestClass("bulk"))), 0.2)
    scheduler.handle(Arrived(make_request("c", 20, request_class=RequestClass("gold"))), 0.3)
    found = read(metrics)
    assert found["slai_queue_class_requests"] == {"class=gold": 1, "class=bulk": 1}
    assert [labels for labels, value in found["slai_engine_obstacle"].items() if value] == [
        "engine=http://e0,reason=slots"
    ]
    scheduler.handle(Ended("a"), 0.4)
    found = read(metrics)
    assert found["slai_queue_class_requests"] == {"class=gold": 0, "class=bulk": 1}
    turns = {labels.removeprefix("turn="): count for labels, count in found["slai_queue_turns_total"].items()}
    assert {turn: count for turn, count in turns.items() if count} == {"alone": 1, "length": 1}
    assert found["slai_queue_overtaking_seconds_total"] == {"": pytest.approx(0.1)}
