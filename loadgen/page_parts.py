"""What stands on a report's page: titles, figures, tables and charts of a run, of a capacity and of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any, TypeAlias

from loadgen.charts import Axis, Chart, Series

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.report import Document

Rows: TypeAlias = "Sequence[Sequence[str]]"
"""A table; the first row has its headings."""

_SHARE = Axis("share of requests", low=0.0, high=1.0, percent=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """All that is particular to one page."""

    title: str
    subtitle: str
    remarks: Sequence[str]
    cards: Sequence[tuple[str, str]]
    tables: Sequence[tuple[str, Rows]] = field(default_factory=tuple)
    charts: Sequence[Chart] = field(default_factory=tuple)


def run_parts(document: Document) -> Parts:
    """The page of one run."""
    from loadgen.report import remarks  # noqa: PLC0415 - which draws its tables with what this module draws pages

    metrics, counts, config = document["metrics"], document["counts"], document["config"]
    everybody = metrics["all"]
    cards = [
        ("TTFT, median", seconds(everybody["ttft_s"]["p50"])),
        ("TTFT, p99", seconds(everybody["ttft_s"]["p99"])),
        *((f"TBT p99, {name}", seconds(group["tbt_s"]["p99"])) for name, group in metrics["by_class"].items()),
        ("attainment", percent(everybody["attainment"])),
        ("goodput", per_second(metrics["attained_per_s"])),
        ("completed", f"{counts['completed']:,} of {counts['sent']:,}"),
        ("output", f"{per_second(metrics['tokens_per_s'], 0).removesuffix('/s')} tokens/s"),
        ("sent late, p99", seconds(document["schedule_delay_s"]["p99"])),
    ]
    if (queue := everybody.get("server_queue_s")) is not None:
        cards.append(("server queue, p99", seconds(queue["p99"])))
    groups = [("all", everybody), *metrics["by_class"].items()]
    groups += [(f"tenant {name}", group) for name, group in metrics["by_tenant"].items()]
    tables: list[tuple[str, Rows]] = [("By class", _groups_table(groups))]
    if lengths := list(metrics["by_prompt_tokens"].items()):
        tables.append(("By prompt length", _groups_table(lengths, first="prompt tokens")))
    tables += [(f"As {whose} defines it", _compat_table(rows)) for whose, rows in document["compat"].items()]
    return Parts(
        "Load test",
        _subtitle(config, counts),
        remarks(document),
        cards,
        tables,
        _run_charts(document["curves"], config.get("classes", ())),
    )


def _subtitle(config: Mapping[str, Any], counts: Mapping[str, Any]) -> str:
    where = (
        ", ".join(config["urls"]) if "urls" in config else f"simulated {config.get('profile')}, {config.get('policy')}"
    )
    rate = config.get("rate")
    how = f"{rate:g} req/s" if isinstance(rate, int | float) else str(rate or "its own times")
    model = f", model {config['model']}" if config.get("model") else ""
    return f"{counts['planned']:,} requests at {how} to {where}{model}; slai-loadgen {config.get('version', '')}"


def _groups_table(groups: Sequence[tuple[str, Mapping[str, Any]]], first: str = "") -> Rows:
    sure = any("intervals" in group for _, group in groups)
    head = (
        first,
        "requests",
        "TTFT p50",
        "95 %",
        "p90",
        "p99",
        "TBT p50",
        "p99",
        "95 %",
        "TPOT p50",
        "end p50",
        "attained",
    )
    rows = [head]
    for name, group in groups:
        ranges = group.get("intervals", {})
        ttft, tbt = group["ttft_s"], group["tbt_s"]
        rows.append(
            (
                name,
                f"{group['requests']:,}",
                seconds(ttft["p50"]),
                _range(ranges.get("ttft_s", {}).get("p50")),
                seconds(ttft["p90"]),
                seconds(ttft["p99"]),
                seconds(tbt["p50"]),
                seconds(tbt["p99"]),
                _range(ranges.get("tbt_s", {}).get("p99")),
                seconds(group["tpot_s"]["p50"]),
                seconds(group["e2e_s"]["p50"]),
                percent(group["attainment"]),
            )
        )
    return rows if sure else [tuple(cell for place, cell in enumerate(row) if head[place] != "95 %") for row in rows]


def _compat_table(rows: Mapping[str, Mapping[str, Any]]) -> Rows:
    head = ("figure", "mean", "p50", "p99", "meaning")
    return [
        head,
        *(
            (name.removesuffix("_s").upper(), *(seconds(row.get(p)) for p in ("mean", "p50", "p99")), row["meaning"])
            for name, row in rows.items()
            if "p50" in row
        ),
    ]


def _run_charts(curves: Mapping[str, Any], classes: Sequence[Mapping[str, Any]]) -> list[Chart]:
    charts = cdf_charts(curves["ttft_cdf"], curves["tbt_cdf"], classes)
    if curves["ttft_by_prompt"]:
        points = [(float(x), float(y)) for x, y in curves["ttft_by_prompt"]]
        charts.append(
            Chart(
                "TTFT by prompt length",
                Axis("prompt (tokens)"),
                Axis("TTFT (s)", log=True),
                [Series("requests", points, scatter=True)],
            )
        )
    series = curves["series"]
    if series:
        at = series["at_s"]

        def line(name: str, key: str) -> Series:
            return Series(name, list(zip(at, series[key], strict=True)))

        rates = [line("arrived", "arrived_per_s"), line("completed", "completed_per_s")]
        if any(series["failed_per_s"]):
            rates.append(line("failed", "failed_per_s"))
        time = Axis("time (s)")
        charts.append(Chart("Rates over time", time, Axis("requests per second"), rates))
        load = [line("waiting for the first token", "waiting"), line("streaming", "streaming")]
        charts.append(Chart("Queue over time", time, Axis("requests"), load))
    return charts


def cdf_charts(
    ttft: Mapping[str, Any], tbt: Mapping[str, Any], classes: Sequence[Mapping[str, Any]] = ()
) -> list[Chart]:
    """TTFT and TBT, each as a distribution, with the classes' deadlines."""
    charts = []
    for name, curves, key in (("TTFT", ttft, "ttft_s"), ("TBT", tbt, "tbt_s")):
        drawn = [Series(label, [(float(x), float(y)) for x, y in points]) for label, points in curves.items() if points]
        if not drawn:
            continue
        deadlines = dict.fromkeys((c[key], c[key]) for c in classes if c.get(key) is not None)
        limits = [
            (at, f"{seconds(at)}: {', '.join(c['name'] for c in classes if c.get(key) == at)}") for at, _ in deadlines
        ]
        label = "share of requests" if key == "ttft_s" else "share of gaps"
        note = "A curve that ends below 100 % has requests without a first token." if key == "ttft_s" else ""
        share = Axis(label, low=0.0, high=1.0, percent=True)
        charts.append(Chart(f"{name}, distribution", Axis(f"{name} (s)", log=True), share, drawn, note, limits))
    return charts


def capacity_parts(document: Document) -> Parts:
    """The page of a search for a capacity."""
    from loadgen.capacity_text import conclusion  # noqa: PLC0415 - as above

    found, config = document["capacity"], document["config"]
    server = config["server"]
    where = ", ".join(server["urls"]) if "urls" in server else f"simulated {server['profile']}, {server['policy']}"
    points = found["points"]
    names = list(points[0]["margins"]) if points else []
    more = [] if "attainment" in names else ["attainment"]
    rows: list[tuple[str, ...]] = [("req/s", "runs", "verdict", *names, *more, "goodput")]
    rows += [
        (
            f"{point['rate']:g}",
            str(len(point["runs"])),
            ("kept" if point["kept"] else f"broken: {', '.join(point['breaks'])}")
            + ("" if point["certain"] else " (by the mean)"),
            *(_limited(point, name) for name in names),
            *(percent(_mean([run[name] for run in point["runs"]])) for name in more),
            per_second(_mean([run["attained_per_s"] for run in point["runs"]])),
        )
        for point in points
    ]
    interval = found["interval"]
    cards = [
        ("capacity", per_second(found["estimate"], 3)),
        ("95 % interval", f"{interval[0]:.3g} to {interval[1]:.3g}" if interval else "-"),
        ("all limits hold at", per_second(found["kept_at"], 3)),
        ("broken at", per_second(found["broken_at"], 3)),
        ("what breaks", ", ".join(found["breaks"]) or "-"),
        ("runs", str(found["runs"])),
    ]
    return Parts(
        "Capacity under an SLO",
        f"{config['slo']}; {where}; slai-loadgen {config['version']}",
        conclusion(document),
        cards,
        [("Rates", rows)],
        _capacity_charts(points, names),
    )


def _capacity_charts(points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Chart]:
    rate = Axis("rate (requests per second)", low=min((p["rate"] for p in points), default=None))
    loads = [
        Series(name, [(p["rate"], min(4.0, exp(p["margins"][name]["mean"]))) for p in points], marked=True)
        for name in names
        if points and not points[0]["margins"][name]["share"]
    ]

    def means(key: str) -> list[tuple[float, float]]:
        pairs = [(p["rate"], _mean([run[key] for run in p["runs"]])) for p in points]
        return [(at, value) for at, value in pairs if value is not None]

    attainment = Series("attainment", means("attainment"), marked=True)
    done = [
        Series("completed", means("completed_per_s"), marked=True),
        Series("goodput", means("attained_per_s"), marked=True),
    ]
    charts = []
    if loads:
        note = "Mean over the seeds; up to 1 the limit is kept, above 4 it is drawn at 4."
        charts.append(
            Chart("Figure over its limit", rate, Axis("figure / limit"), loads, note, y_limits=[(1.0, "limit")])
        )
    charts.append(Chart("Attainment against rate", rate, _SHARE, [attainment]))
    charts.append(Chart("Throughput against rate", rate, Axis("requests per second"), done))
    return charts


def comparison_parts(document: Document) -> Parts:
    """The page of a comparison."""
    sides, config = document["sides"], document["config"]
    head = ("", *(f"{name}" for name in sides), *(f"{row} / {document['base']}, 95 %" for row in document["ratios"]))
    rows: list[tuple[str, ...]] = [head]
    for label, cells in document["table"]:
        rows.append((label, *cells))
    return Parts(
        "Comparison",
        f"{', '.join(sides)}: {config['requests']:,} requests at {config['rate']} req/s, {config['rounds']} rounds; "
        f"slai-loadgen {config['version']}",
        document["remarks"],
        [(f"TTFT p50, {name}", seconds(side["ttft_s"]["p50"])) for name, side in sides.items()],
        [("Figures, and their ratios request by request", rows)],
        cdf_charts(document["curves"]["ttft_cdf"], document["curves"]["tbt_cdf"]),
    )


def _limited(point: Mapping[str, Any], name: str) -> str:
    values = [run["values"][name] for run in point["runs"]]
    mean = None if any(value is None for value in values) else _mean(values)
    return percent(mean) if point["margins"][name]["share"] else seconds(mean)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def seconds(value: float | None) -> str:
    """Write a duration given in seconds."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def percent(value: float | None) -> str:
    """Write a share."""
    return "-" if value is None else f"{100 * value:.2f} %"


def per_second(value: float | None, digits: int = 2) -> str:
    """Write a rate."""
    return "-" if value is None else f"{value:,.{digits}f}/s"


def _range(pair: Sequence[float | None] | None) -> str:
    if pair is None or pair[0] is None:
        return "-"
    low, high = seconds(pair[0]), "never" if pair[1] is None else seconds(pair[1])
    same_unit = low.split(" ")[-1] == high.split(" ")[-1]
    return f"{low.split(' ')[0] if same_unit else low} - {high}"
