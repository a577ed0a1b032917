"""Writes the reference pages."""

from __future__ import annotations

from reference.pages import write

if __name__ == "__main__":
    write()
