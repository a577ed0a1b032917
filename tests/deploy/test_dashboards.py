"""Dashboards and rules ask for what there is, and say what it means."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.events import EngineUp
from proxy.core.limits import EngineLimits
from proxy.core.scheduler import Scheduler
from proxy.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
NAME = re.compile(r"\b(?:slai[a-z_:0-9]*|gen_ai_[a-z_]+|process_[a-z_]+)\b")

panels = pytest.importorskip("dashboards.panels")
build = pytest.importorskip("dashboards.build", reason="the dashboards' SDK is not installed")


def names(expression: str) -> set[str]:
    return set(NAME.findall(re.sub(r'"[^"]*"', "", expression)))


def known() -> set[str]:
    """Every series that a proxy can have, and every recorded one."""
    scheduler = Scheduler()
    scheduler.handle(EngineUp("http://e", EngineLimits(), frozenset()), 0.0)
    metrics = Metrics(scheduler, ["strict"], ["a"])
    text = metrics.exposition().decode()
    declared = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    sampled = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    histograms = set(re.findall(r"^# TYPE (\S+) histogram", text, re.MULTILINE))
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    # Instruments without a label known beforehand have no series until the first measurement.
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "proxy").rglob("*.py")))
    later = {n.replace(".", "_") for n in re.findall(r'"((?:slai|gen_ai)\.[a-z_.]+)"', source)}
    endings = {f"{name}{end}" for name in later for end in ("", "_total", "_seconds", "_bytes")}
    parts = {f"{n}{part}" for n in histograms | endings for part in ("_bucket", "_count", "_sum")}
    return declared | sampled | recorded | endings | parts


def test_the_committed_dashboards_are_the_ones_that_the_code_makes() -> None:
    for board in panels.BOARDS:
        committed = (ROOT / "dashboards" / f"{board.uid}.json").read_text(encoding="utf-8")
        assert committed == build.render(board), "run make dashboards"


def test_every_panel_says_what_it_shows_and_asks_for_what_there_is() -> None:
    there = known()
    for board in panels.BOARDS:
        for _, row in board.rows:
            for panel in row:
                assert panel.unit, panel.title
                assert len(panel.description) > 20, panel.title
                assert panel.queries, panel.title
                for query in panel.queries:
                    asked = names(query.expression)
                    assert asked, query
                    assert asked <= there, (panel.title, asked - there)


def test_every_dashboard_is_one_that_grafana_reads() -> None:
    seen = set()
    for board in panels.BOARDS:
        made = json.loads(build.render(board))
        seen.add(made["uid"])
        ids = [panel["id"] for panel in made["panels"]]
        assert len(ids) == len(set(ids))
        assert made["schemaVersion"] >= 39
        for panel in made["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
    assert len(seen) == len(panels.BOARDS)


def test_quantiles_show_the_requests_behind_them() -> None:
    made = json.loads(build.render(panels.OVERVIEW))
    targets = [target for panel in made["panels"] for target in panel.get("targets", [])]
    assert {bool(t.get("exemplar")) for t in targets if t["expr"].startswith("histogram_quantile")} == {True}
    assert not [t for t in targets if t.get("exemplar") and "histogram_quantile" not in t["expr"]]


def test_the_models_of_grafana_know_everything_in_a_dashboard() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        committed = json.loads(path.read_text(encoding="utf-8"))
        assert json.loads(JSONEncoder().encode(Dashboard.from_json(committed))) == committed, path
        changed = committed | {"titel": "x"}
        assert json.loads(JSONEncoder().encode(Dashboard.from_json(changed))) != changed, "they would let anything pass"


def test_every_rule_asks_for_what_there_is_and_every_alert_says_what_to_do() -> None:
    there = known()
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert names(rule["expr"]) <= there, rule
            if "alert" in rule:
                assert set(rule["annotations"]) == {"summary", "what_to_do", "runbook"}
                assert rule["labels"]["severity"] in {"page", "ticket"}


def alerts() -> dict[str, dict[str, str]]:
    return {
        rule["alert"]: rule["annotations"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
    }


def test_every_alert_names_the_section_that_explains_it() -> None:
    for name, annotations in alerts().items():
        page, _, anchor = annotations["runbook"].partition("#")
        headings = re.findall(r"^### (\w+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor == name.lower()
        assert name in headings
    assert set(headings) == set(alerts()), "a section explains what there is not"


def test_every_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load((ROOT / "deploy/prometheus/rules_test.yml").read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: apt install prometheus)")
def test_the_rules_pass_their_own_tests() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"],
        cwd=ROOT / "deploy/prometheus",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
