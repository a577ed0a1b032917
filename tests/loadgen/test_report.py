import io
import json
from array import array
from typing import Any

from rich.console import Console
from rich.table import Table
from samples import result
from scripted_upstream import request_at

from loadgen.report import Document, build_document, comparison_table, remarks, run_tables, same_workload, show
from proxy.core.request import RequestClass
from proxy.sim.records import RequestRecord

GOLD = RequestClass("gold", ttft_seconds=2.0, tbt_seconds=0.1)
CONFIG: dict[str, Any] = {
    "rate": 1.0,
    "requests": 3,
    "seed": 0,
    "classes": [{"name": "gold", "share": 1.0, "ttft_s": 2.0, "tbt_s": 0.1}],
}
TRACE = {"name": "t.csv", "sha256": "ab"}


def record(at: float, *, ttft: float = 0.5, late: float = 0.0, gap: float = 0.05, prompt: int = 3) -> RequestRecord:
    first = at + ttft
    return RequestRecord(
        request_at(at, prompt=prompt, kind=GOLD),
        sent_at=at + late,
        first_token_at=first,
        last_token_at=first + gap,
        finished_at=first + gap,
        tokens=2,
        gaps=array("d", [gap]),
    )


def failed(at: float, error: str) -> RequestRecord:
    return RequestRecord(request_at(at, kind=GOLD), sent_at=at, finished_at=at, error=error)


def document(*records: RequestRecord, **more: Any) -> Document:
    return build_document(records, planned=len(records), config=CONFIG, trace=TRACE, **more)


def text(*renderables: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(console, *renderables)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(table: Table) -> dict[str, list[str]]:
    """Return a table's rows by their first cell."""
    columns = [list(map(str, column.cells)) for column in table.columns]
    return {row[0]: list(row[1:]) for row in zip(*columns, strict=True)}


def test_the_document_is_json_with_all_its_parts() -> None:
    written = json.loads(json.dumps(document(record(0.0), failed(1.0, "http 503"), clipped=1), allow_nan=False))
    assert (written["schema_version"], written["kind"]) == (2, "run")
    assert written["counts"] == {
        "planned": 2,
        "sent": 2,
        "completed": 1,
        "failed": 1,
        "short_outputs": 0,
        "other_prompt_lengths": 0,
        "cached_prompt_tokens": 0,
        "clipped": 1,
        "by_class": {"gold": 2},
    }
    assert written["metrics"]["errors"] == {"http 503": 1}
    assert written["metrics"]["attainment"] == {"gold": 0.5}
    assert written["schedule_delay_s"] == {"p50": 0.0, "p99": 0.0}
    assert (written["valid"], written["invalid_reason"], written["interrupted"]) == (True, None, False)
    assert (written["trace"], written["config"]) == (TRACE, CONFIG)


def test_an_output_of_another_length_is_counted() -> None:
    short = record(0.0)
    short.tokens = 1
    assert document(short, record(1.0))["counts"]["short_outputs"] == 1


def test_a_late_client_makes_the_run_invalid() -> None:
    late = document(record(0.0, late=0.2), record(1.0, late=0.2))
    assert not late["valid"]
    assert "the client was late" in late["invalid_reason"]
    assert any("not valid" in remark for remark in remarks(late))


def test_lateness_that_hardly_changes_ttft_is_tolerated() -> None:
    assert document(record(0.0, ttft=0.01, late=0.009))["valid"]
    assert document(record(0.0, ttft=10.0, late=0.2))["valid"]


def test_a_run_without_any_completion_is_invalid() -> None:
    assert document(failed(0.0, "connect"))["invalid_reason"] == "nothing completed"
    assert document()["invalid_reason"] == "nothing completed"


def test_an_interrupted_run_is_invalid() -> None:
    assert document(record(0.0), interrupted=True)["invalid_reason"] == "interrupted before its end"


def test_the_tables_show_ttft_tbt_attainment_and_totals() -> None:
    shown = text(run_tables(document(record(0.0), record(1.0, ttft=1.5, prompt=300), failed(2.0, "cut"))))
    lines = [line.split() for line in shown.splitlines()]
    assert ["TTFT", "of", "requests", "p50", "(s)", "p90", "(s)", "p99", "(s)"] in lines
    assert ["all", "3", "1.500", "-", "-"] in lines  # The failed request's TTFT is infinite.
    assert ["prompt", "0-255", "2", "-", "-"] in lines
    assert ["prompt", "256-1023", "1", "1.500", "1.500"] in lines
    assert ["gold", "50.0", "50.0", "100.0", "66.7"] in lines
    assert ["failed", "requests", "1"] in lines
    assert ["completed", "req/s", "0.784"] in lines
    assert ["output", "tokens/s", "2"] in lines
    assert max(map(len, shown.splitlines())) < 80


def test_the_tables_of_an_empty_run_can_be_drawn() -> None:
    assert "all" in text(run_tables(document()))


def test_remarks_name_failures_short_outputs_and_clipping() -> None:
    short = record(0.0)
    short.tokens = 1
    told = " ".join(
        remarks(document(short, failed(1.0, "cut"), failed(2.0, "cut"), failed(3.0, "http 503"), clipped=4))
    )
    assert "2 x cut, 1 x http 503" in told
    assert "1 outputs were not as long" in told
    assert "4 of 4 requests" in told
    assert remarks(document(record(0.0))) == []


def test_remarks_tell_what_to_do_about_a_model_that_the_server_has_not() -> None:
    assert any("--model" in remark for remark in remarks(document(failed(1.0, "http 404"))))
    assert not any("--model" in remark for remark in remarks(document(failed(1.0, "http 503"))))


def test_prompts_are_held_against_what_the_server_counts() -> None:
    exact, other, untold = result(prompt=30), result(1.0, index=1, prompt=30), result(2.0, index=2, prompt=30)
    exact.prompt_tokens, other.prompt_tokens, other.cached_tokens = 30, 31, 16
    found = document(exact, other, untold)
    assert found["counts"]["other_prompt_lengths"] == 1
    assert found["counts"]["cached_prompt_tokens"] == 16
    told = " ".join(remarks(found))
    assert "1 prompts were not as long as asked for" in told
    assert "16 prompt tokens were found in a prefix cache" in told


def test_a_comparison_gives_the_second_over_the_first() -> None:
    table = comparison_table(
        document(record(0.0, ttft=1.0)), document(record(0.0, ttft=0.5, gap=0.1)), ("fcfs", "slai")
    )
    assert [str(column.header) for column in table.columns] == ["", "unit", "fcfs", "slai", "slai / fcfs"]
    rows = cells(table)
    assert rows["TTFT p50"] == ["s", "1.000", "0.500", "0.50"]
    assert rows["TTFT p99, prompt 0-255"] == ["s", "1.000", "0.500", "0.50"]
    assert rows["TBT p99, gold"] == ["ms", "50.0", "100.0", "2.00"]
    assert rows["attainment, gold"] == ["%", "100.0", "100.0", "1.00"]
    assert rows["failed"] == ["requests", "0", "0", "-"]
    assert all(column.justify == "right" for column in table.columns[2:])


def test_a_comparison_leaves_out_what_one_run_lacks() -> None:
    rows = cells(comparison_table(document(record(0.0)), document(failed(0.0, "cut"))))
    assert rows["TTFT p50"] == ["s", "0.500", "-", "-"]
    rows = cells(comparison_table(document(record(0.0)), document(record(0.0, prompt=9000))))
    assert rows["TTFT p50, prompt 8192+"] == ["s", "-", "0.500", "-"]


def test_runs_of_different_workloads_are_told_apart() -> None:
    a, b, moved = document(record(0.0)), document(record(0.0)), document(record(0.0))
    b["config"] = {**CONFIG, "seed": 1}
    moved["trace"] = {"name": "elsewhere/t.csv", "sha256": "ab"}
    assert not same_workload(a, b)
    assert same_workload(a, moved)
