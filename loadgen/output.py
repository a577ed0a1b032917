"""Where a report goes: tables on the terminal, and files for programs and browsers."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from loadgen.compat import Compat
from loadgen.page import page_of
from loadgen.record_file import check_record_file, write_records
from loadgen.server_arguments import check_output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from loadgen.report import Document
    from proxy.sim.records import RequestRecord


class Format(StrEnum):
    """Files that a command can write, by the option that asks for them."""

    JSON = "json"
    HTML = "html"
    RECORDS = "records"


def add_report_arguments(parser: argparse.ArgumentParser, *formats: Format) -> None:
    """Add the options that say where the report goes."""
    report = parser.add_argument_group("report")
    if Format.JSON in formats:
        report.add_argument("--json", metavar="OUT", help="write the whole report to this file; - for standard output")
    if Format.HTML in formats:
        report.add_argument(
            "--html", metavar="OUT", help="write a page with plots, complete in one file that any browser shows"
        )
    if Format.RECORDS in formats:
        report.add_argument(
            "--records",
            metavar="OUT",
            help="write every request, with the time of each of its chunks: JSON lines, or Parquet if the name ends in "
            ".parquet (needs slai-proxy[parquet])",
        )
        report.add_argument(
            "--compat",
            action="append",
            type=Compat,
            choices=list(Compat),
            default=[],
            help="also show what vllm bench serve, or the SLAI paper's scripts, would have called TTFT and TBT",
        )


def refuse_unwritable(args: argparse.Namespace) -> None:
    """Find out before a run that one of its files cannot be written.

    Raises:
        ValueError: one cannot; the message says which.
    """
    for form in Format:
        if why := check_output(f"--{form}", getattr(args, form, None)):
            raise ValueError(why)
    if getattr(args, "records", None) is not None:
        check_record_file(args.records)


def publish(args: argparse.Namespace, document: Document, records: Sequence[RequestRecord] = ()) -> None:
    """Write the files of a report that ``args`` ask for."""
    write_json(document, args.json)
    if getattr(args, "records", None) is not None:
        write_records(args.records, records)
    if getattr(args, "html", None) is not None:
        Path(args.html).write_text(page_of(document), encoding="utf-8")


def write_json(document: Any, target: str | None) -> None:
    """Write a document to a file, or to standard output."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        Path(target).write_text(text, encoding="utf-8")


def table_console(*, stderr: bool = False) -> Console:
    """Return where tables go; a pipe has no width, and rich would take 80 columns and cut them."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)
