from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from proxy.telemetry.merging import merge

ONE = b"""\
# HELP requests_total Requests
# TYPE requests_total counter
requests_total{class="a b",path="{x}"} 3.0
requests_total{class="b"} 1e+06
# HELP up Engines that are up
# TYPE up gauge
up 2.0
"""
TWO = b"""\
# HELP up Engines that are up
# TYPE up gauge
up 1.0
# HELP requests_total Requests
# TYPE requests_total counter
requests_total{class="b"} 5.0
# HELP late_total Only here
# TYPE late_total counter
late_total{} 7.0
"""


def test_every_series_is_there_with_its_worker_and_families_are_described_once() -> None:
    merged = merge({"0": ONE, "1": TWO}).decode()
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
    }
    assert found == {
        ("requests_total", (("class", "a b"), ("path", "{x}"), ("worker", "0"))): 3.0,
        ("requests_total", (("class", "b"), ("worker", "0"))): 1e6,
        ("requests_total", (("class", "b"), ("worker", "1"))): 5.0,
        ("up", (("worker", "0"),)): 2.0,
        ("up", (("worker", "1"),)): 1.0,
        ("late_total", (("worker", "1"),)): 7.0,
    }
    lines = merged.splitlines()
    assert len([line for line in lines if line.startswith("# TYPE up")]) == 1
    names = [line.split("{")[0] for line in lines if not line.startswith("#")]
    assert names == sorted(names, key=names.index), "the samples of a family stand together"


def test_one_process_alone_is_told_with_its_number_too() -> None:
    assert merge({"0": b"up 2.0\n"}) == b'up{worker="0"} 2.0\n'


def test_openmetrics_end_once_and_keep_the_traces_behind_measurements() -> None:
    told = b'# TYPE t histogram\nt_bucket{le="1.0"} 1.0 # {trace_id="ab"} 0.5\n# EOF\n'
    assert merge({"0": told, "1": told}).splitlines() == [
        b"# TYPE t histogram",
        b't_bucket{worker="0",le="1.0"} 1.0 # {trace_id="ab"} 0.5',
        b't_bucket{worker="1",le="1.0"} 1.0 # {trace_id="ab"} 0.5',
        b"# EOF",
    ]
