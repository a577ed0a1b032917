"""Kinds of command-line arguments: each reads a text, or tells argparse what is wrong with it."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


def told(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Let argparse tell the user what a ValueError says."""

    def parse_or_tell(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_tell


def list_of(parse: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Read entries with commas between them, none twice."""

    def parse_list(text: str) -> list[Value]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise ValueError(f"{text!r} is not a list such as 1,2,3" if text else "the list is empty")
        values = [parse(part) for part in parts]
        if len(set(values)) < len(values):
            raise ValueError(f"{text!r} has the same entry twice")
        return values

    return told(parse_list)


def positive(text: str) -> float:
    """Read a finite number above zero."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def not_negative(text: str) -> float:
    """Read a finite number, zero or above."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not zero or a positive number")


def share(text: str) -> float:
    """Read a number from 0 to below 1."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")


def count(text: str) -> int:
    """Read a whole number, 1 or above."""
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")


def none_or_more(text: str) -> int:
    """Read a whole number, 0 or above."""
    with suppress(ValueError):
        if (value := int(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not zero or a positive whole number")


def whole(text: str) -> int:
    """Read a whole number."""
    with suppress(ValueError):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
