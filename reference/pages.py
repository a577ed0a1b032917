"""Which reference pages there are."""

from __future__ import annotations

from pathlib import Path

from reference import configuration, metrics

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"configuration.md": configuration.render, "metrics.md": metrics.render}


def write() -> None:
    """Write every page."""
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
