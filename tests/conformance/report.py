"""Tables of verdicts: for a terminal, as JSON, as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from conformance.suite import Case, Result, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SIGNS = {Result.PASSED: "ok", Result.FAILED: "FAILED", Result.NOT_APPLICABLE: "-"}


def line(verdict: Verdict) -> str:
    """Return a verdict as one line."""
    text = f"{_SIGNS[verdict.result]:6} {verdict.case.id}  ({verdict.seconds:.2f} s)"
    return f"{text}\n       {verdict.case.situation}\n       {verdict.message}" if verdict.message else text


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.result for verdict in verdicts)
    return ", ".join(f"{counts[result]} {result}" for result in Result)


def as_json(name: str, version: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "proxy": name,
        "version": version,
        "cases": [
            {"id": v.case.id, "result": str(v.result), "message": v.message, "seconds": round(v.seconds, 3)}
            for v in verdicts
        ],
    }


def table_of_cases(cases: Sequence[Case]) -> str:
    """Return what is put to a proxy, what is right and why, as Markdown."""
    rows = ["| case | situation | right | why |", "|---|---|---|---|"]
    for area in dict.fromkeys(case.area for case in cases):
        rows.append(f"| **{area}** | | | |")
        for case in cases:
            if case.area == area:
                cells = (f"`{case.id}`", case.situation, case.right, case.why)
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def table_of_results(results: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> str:
    """Return who passes which case, as Markdown, from what ``as_json`` gave of each proxy."""
    names = [str(result["proxy"]) for result in results]
    found = [{entry["id"]: entry["result"] for entry in result["cases"]} for result in results]
    signs = {str(result): sign for result, sign in _SIGNS.items()} | {"failed": "**failed**"}
    rows = ["| case | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    rows += [
        f"| `{case.id}` | " + " | ".join(signs.get(f.get(case.id, ""), "") for f in found) + " |" for case in cases
    ]
    return "\n".join(rows)


def table_of_proxies(results: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cases each proxy passed, as Markdown."""
    rows = ["| proxy | version | passed | failed | not applicable |", "|---|---|---|---|---|"]
    for result in results:
        counts = Counter(entry["result"] for entry in result["cases"])
        cells = (result["proxy"], result["version"], *(counts[str(r)] for r in Result))
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(rows)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=1)
