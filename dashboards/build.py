"""Makes the JSON of every dashboard, for Grafana's provisioning, and the rules as the Prometheus operator wants them.

The SDK's newest release is of the oldest schema (its versions carry an epoch), so it is pinned in ``pyproject.toml``.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import BOARDS

if TYPE_CHECKING:
    from dashboards.panels import Board, Panel

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_DEPLOY = Path(__file__).parents[1] / "deploy"
OPERATOR_RULES = _DEPLOY / "kubernetes/components/monitoring/prometheusrule.yaml"
_WIDTH = 24
_HEIGHT = 7


def render(board: Board) -> str:
    """Return a dashboard as Grafana reads it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["slai-proxy"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(dashboard.DashboardLink("slai-proxy").type(models.DashboardLinkType.DASHBOARDS).tags(["slai-proxy"]))
    )
    number = itertools.count(1)
    for title, panels in board.rows:
        made = made.with_row(dashboard.Row(title).id(next(number)))
        span = _WIDTH // len(panels)
        for panel in panels:
            made = made.with_panel(_panel(panel, span).id(next(number)))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel, span: int) -> timeseries.Panel | stat.Panel:
    made: timeseries.Panel | stat.Panel
    if panel.stat:
        made = stat.Panel().graph_mode(common_models.BigValueGraphMode.AREA)
    else:
        made = timeseries.Panel().fill_opacity(30 if panel.stacked else 8).line_width(1.5)
        if panel.stacked:
            made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
        made = made.min(0) if panel.title != "TBT slack" else made
    made = made.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    made = made.span(span).height(_HEIGHT)
    for query in panel.queries:
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).range()
        # What its buckets were measured on, where Prometheus keeps that: dots that lead to traces.
        made = made.with_target(target.exemplar(True) if query.expression.startswith("histogram_quantile") else target)
    return made


def render_rules() -> str:
    """Return Prometheus' rules as the Prometheus operator reads them."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "slai-proxy"},
        "spec": yaml.safe_load((_DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8")),
    }
    return "# Made from deploy/prometheus/rules.yml by 'make dashboards'.\n" + yaml.safe_dump(
        rule, sort_keys=False, width=120, allow_unicode=True
    )


def main() -> None:
    """Write every dashboard beside this module, and the rules for the Prometheus operator."""
    for board in BOARDS:
        Path(__file__).with_name(f"{board.uid}.json").write_text(render(board), encoding="utf-8")
    OPERATOR_RULES.write_text(render_rules(), encoding="utf-8")


if __name__ == "__main__":
    main()
