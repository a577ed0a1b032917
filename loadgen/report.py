"""What a run leaves behind: one JSON document, and tables drawn from such documents."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from loadgen.compat import Compat, compat_figures
from loadgen.curves import curves_of
from loadgen.metrics import measure
from loadgen.results import Result

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from proxy.sim.records import RequestRecord
    from proxy.sim.workload import ClassShare

SCHEMA_VERSION = 2

Document = dict[str, Any]
"""The report of one run as it goes to JSON; times in seconds of the run's own time."""

# A sender late by less changes no figure that anyone reads.
_TOLERATED_DELAY_SECONDS = 0.010
_TOLERATED_SHARE_OF_TTFT = 0.1


def build_document(
    records: Sequence[RequestRecord],
    *,
    planned: int,
    config: Mapping[str, Any],
    trace: Mapping[str, Any],
    clipped: int = 0,
    interrupted: bool = False,
    compat: Iterable[Compat] = (),
) -> Document:
    """Describe a run of ``planned`` requests, of which ``records`` were sent and ``clipped`` had a length cut."""
    metrics = measure(records)
    delay = metrics.pop("schedule_delay_s")
    short = sum(r.completed and r.tokens != r.request.output_tokens for r in records)
    reason = _why_invalid(metrics, delay["p99"], interrupted=interrupted)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "run",
        "config": dict(config),
        "trace": dict(trace),
        "counts": {
            "planned": planned,
            "sent": len(records),
            "completed": metrics["completed"],
            "failed": len(records) - metrics["completed"],
            "short_outputs": short,
            **_told_by_usage(records),
            "clipped": clipped,
            "by_class": Counter(r.request.request_class.name for r in records),
        },
        "metrics": metrics,
        "compat": {str(whose): compat_figures(whose, records) for whose in compat},
        "curves": curves_of(records),
        "schedule_delay_s": delay,
        "interrupted": interrupted,
        "valid": reason is None,
        "invalid_reason": reason,
    }


def _told_by_usage(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Count what servers say of their prompts beside what was asked for."""
    told = [r for r in records if isinstance(r, Result) and r.prompt_tokens is not None]
    return {
        "other_prompt_lengths": sum(r.prompt_tokens != r.request.prompt_tokens for r in told),
        "cached_prompt_tokens": sum(r.cached_tokens or 0 for r in told),
    }


def tolerated_delay(median_ttft_seconds: float | None) -> float:
    """Return by how much one request in a hundred may leave late, in seconds, and the run still be valid."""
    return max(_TOLERATED_DELAY_SECONDS, _TOLERATED_SHARE_OF_TTFT * (median_ttft_seconds or 0.0))


def _why_invalid(metrics: Mapping[str, Any], delay: float | None, *, interrupted: bool) -> str | None:
    if interrupted:
        return "interrupted before its end"
    if not metrics["completed"]:
        return "nothing completed"
    return late_client(metrics["ttft_s"]["p50"], delay)


def late_client(ttft_p50: float | None, delay_p99: float | None) -> str | None:
    """Say why a run is not valid if the client itself was late; seconds.

    TTFT counts from the intended time, so a late client makes every server look equally slow.
    """
    limit = max(_TOLERATED_DELAY_SECONDS, _TOLERATED_SHARE_OF_TTFT * (ttft_p50 or 0.0))
    if delay_p99 is not None and delay_p99 > limit:
        return (
            f"the client was late: 1 % of the requests left more than {1000 * delay_p99:.0f} ms after their time "
            f"({1000 * limit:.0f} ms is tolerated); it needs more CPU, or a lower rate or time scale"
        )
    return None


def run_tables(document: Document) -> Group:
    """Draw one run: TTFT, then TBT and attainment by class, then the totals."""
    metrics, counts = document["metrics"], document["counts"]
    deadlines = {c["name"]: c for c in document["config"].get("classes", [])}

    ttft = new_table("TTFT of", "requests", "p50 (s)", "p90 (s)", "p99 (s)")
    ttft.add_row("all", str(metrics["requests"]), *(_number(metrics["ttft_s"][p]) for p in ("p50", "p90", "p99")))
    for name, row in metrics["ttft_s_by_class"].items():
        ttft.add_row(name, str(counts["by_class"][name]), *(_number(row[p]) for p in ("p50", "p90", "p99")))
    for bucket, row in metrics["ttft_s_by_prompt_tokens"].items():
        ttft.add_row(f"prompt {bucket}", str(row["requests"]), _number(row["p50"]), "", _number(row["p99"]))

    for name, row in metrics.get("ttft_s_by_tenant", {}).items():
        ttft.add_row(f"tenant {name}", str(row["requests"]), *(_number(row[p]) for p in ("p50", "p90", "p99")))

    classes = new_table("class", "TBT p50 (ms)", "TBT p99 (ms)", "deadline (ms)", "attainment (%)")
    for name, row in metrics["tbt_s"].items():
        deadline = deadlines.get(name, {}).get("tbt_s")
        figures = (_milli(row["p50"]), _milli(row["p99"]), _milli(deadline))
        classes.add_row(name, *figures, _percent(metrics["attainment"][name]))

    totals = new_table("in all", "unit", "value")
    for label, unit, value in (
        ("sent", "requests", f"{counts['sent']:,}"),
        ("completed", "requests", f"{counts['completed']:,}"),
        ("failed", "requests", f"{counts['failed']:,}"),
        ("offered", "req/s", _number(metrics["offered_per_s"])),
        ("completed", "req/s", _number(metrics["completed_per_s"])),
        ("output", "tokens/s", _number(metrics["tokens_per_s"], 0)),
        ("sent late, p99", "ms", _milli(document["schedule_delay_s"]["p99"])),
        *_held_back(metrics["all"].get("server_queue_s")),
    ):
        totals.add_row(label, unit, value)
    return Group(ttft, classes, totals)


def _held_back(told: Mapping[str, float | None] | None) -> Iterator[tuple[str, str, str]]:
    """Yield rows on the time in the servers' queues, where they tell."""
    if told is not None:
        yield from ((f"in the server's queue, {p}", "ms", _milli(told[p])) for p in ("p50", "p99"))


def compat_tables(document: Document) -> list[Table]:
    """Other tools' figures of the same run, beside ours and apart from them."""
    ours, found = document["metrics"]["all"], []
    for whose, figures in document["compat"].items():
        drawn = new_table(f"as {whose} defines it", "mean", "p50", "p99", "ours: mean", "p50", "p99")
        for name, row in figures.items():
            if name == "per_s":
                rates = (document["metrics"]["completed_per_s"], document["metrics"]["tokens_per_s"])
                for key, rate in zip(("requests", "output_tokens"), rates, strict=True):
                    drawn.add_row(f"{key.replace('_', ' ')}/s", _number(row[key], 2), "", "", _number(rate, 2), "", "")
                continue
            own = ours["tbt_s" if name == "itl_s" else name]
            cells = (*(row[p] for p in ("mean", "p50", "p99")), *(own[p] for p in ("mean", "p50", "p99")))
            drawn.add_row(f"{name.removesuffix('_s').upper()} (ms)", *map(_milli, cells))
        found.append(drawn)
    return found


def compat_notes(document: Document) -> list[str]:
    """Say what those figures mean."""
    return [
        f"{name.removesuffix('_s').upper()} as {whose} has it: {row['meaning']}."
        for whose, figures in document["compat"].items()
        for name, row in figures.items()
        if name != "per_s"
    ]


_HINTS = {
    "http 400": "the server refuses what is asked for, most often as too long: see its log, and --max-total-tokens.",
    "http 401": "the server wants an API key: put it into an environment variable and name that with --api-key-env.",
    "http 404": "the server has no such model or path: compare --model with its GET /v1/models, and --api.",
}


def remarks(document: Document) -> list[str]:
    """Say in sentences what the reader of a run's figures must know beside them."""
    counts, errors = document["counts"], document["metrics"]["errors"]
    found = []
    if errors:
        listed = ", ".join(f"{n} x {error}" for error, n in sorted(errors.items(), key=lambda item: -item[1]))
        found.append(f"Failed: {listed}. A failed request counts as a missed deadline.")
        found.extend(f"{error}: {_HINTS[error]}" for error in sorted(errors) if error in _HINTS)
    if counts["short_outputs"]:
        found.append(f"{counts['short_outputs']} outputs were not as long as asked for.")
    if counts.get("other_prompt_lengths"):
        found.append(f"{counts['other_prompt_lengths']} prompts were not as long as asked for, by the server's count.")
    if counts.get("cached_prompt_tokens"):
        found.append(f"{counts['cached_prompt_tokens']:,} prompt tokens were found in a prefix cache.")
    if counts["clipped"]:
        found.append(
            f"{counts['clipped']} of {counts['planned']} requests had a length over the limit and were clipped."
        )
    if not document["valid"]:
        found.append(f"This run is not valid: {document['invalid_reason']}.")
    return found


def comparison_table(a: Document, b: Document, names: tuple[str, str] = ("a", "b"), *, by_length: bool = True) -> Table:
    """Set two runs side by side; the last column is the second over the first.

    ``by_length`` adds TTFT for each range of prompt lengths.
    """
    table = new_table("", "unit", *names, f"{names[1]} / {names[0]}")
    classes, buckets = _labels(a, b)
    labels = (classes, buckets if by_length else [])
    for (label, unit, digits, first), (_, _, _, second) in zip(_figures(a, labels), _figures(b, labels), strict=True):
        ratio = f"{second / first:.2f}" if first and second is not None else "-"
        table.add_row(label, unit, _number(first, digits), _number(second, digits), ratio)
    return table


def describe_classes(classes: Iterable[ClassShare]) -> list[dict[str, Any]]:
    """The classes of a run's users as they stand in its document's ``config``."""
    return [
        {
            "name": c.request_class.name,
            "share": c.share,
            "ttft_s": c.request_class.ttft_seconds,
            "tbt_s": c.request_class.tbt_seconds,
        }
        for c in classes
    ]


def same_workload(a: Document, b: Document) -> bool:
    """Tell whether two runs were sent the same requests at the same times."""
    keys = ("rate", "requests", "seed", "classes", "tenants", "max_prompt_tokens", "max_output_tokens", "scale_lengths")
    return _identity(a["trace"]) == _identity(b["trace"]) and all(
        a["config"].get(k) == b["config"].get(k) for k in keys
    )


def show(console: Console, *renderables: Group | Table) -> None:
    """Print tables: with rules on a terminal, plain columns elsewhere."""
    for renderable in renderables:
        for table in renderable.renderables if isinstance(renderable, Group) else (renderable,):
            if isinstance(table, Table) and not console.is_terminal:
                table.box = None
            console.print(table)
            console.print()


def _identity(trace: Mapping[str, Any]) -> Any:
    # The same file may lie at two places.
    return trace.get("sha256") or trace.get("name")


_Labels = tuple[list[str], list[str]]


def _labels(a: Document, b: Document) -> _Labels:
    """Return the classes and the length buckets that occur in either run, in order."""
    classes, buckets = (
        dict.fromkeys((*a["metrics"][key], *b["metrics"][key])) for key in ("tbt_s", "ttft_s_by_prompt_tokens")
    )
    return sorted(classes), sorted(buckets, key=lambda bucket: int(bucket.rstrip("+").split("-")[0]))


def _figures(document: Document, labels: _Labels) -> Iterator[tuple[str, str, int, float | None]]:
    """Yield label, unit, digits and value of each row of a comparison."""
    metrics, (classes, buckets) = document["metrics"], labels
    for p in ("p50", "p90", "p99"):
        yield f"TTFT {p}", "s", 3, metrics["ttft_s"][p]
    for bucket in buckets:
        for p in ("p50", "p99"):
            yield f"TTFT {p}, prompt {bucket}", "s", 3, metrics["ttft_s_by_prompt_tokens"].get(bucket, {}).get(p)
    for name in classes:
        tbt = metrics["tbt_s"].get(name, {}).get("p99")
        yield f"TBT p99, {name}", "ms", 1, None if tbt is None else 1000 * tbt
    for name in classes:
        attained = metrics["attainment"].get(name)
        yield f"attainment, {name}", "%", 1, None if attained is None else 100 * attained
    yield "completed", "req/s", 3, metrics["completed_per_s"]
    yield "output", "tokens/s", 0, metrics["tokens_per_s"]
    yield "failed", "requests", 0, document["counts"]["failed"]


def new_table(first: str, *columns: str) -> Table:
    """Return an empty table: the first column names the row, the others are figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _milli(value: float | None) -> str:
    return _number(None if value is None else 1000 * value, 1)


def _percent(value: float | None) -> str:
    return _number(None if value is None else 100 * value, 1)
