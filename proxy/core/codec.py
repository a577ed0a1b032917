"""The core's values as plain JSON values and back: what decision logs and state files are made of.

Every public enumeration and every frozen dataclass of this package can be told, with all that it holds, so a new event,
action or setting needs nothing here. What comes back is equal to what went in, except for text that is too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from importlib import import_module
from math import isfinite
from pkgutil import iter_modules
from typing import Any

from proxy import core

_LARGEST_INT = 1 << 53
"""Larger ones are no JSON numbers to everybody."""
LONGEST_TEXT = 256
"""Longer strings, which only clients can bring (the name of a model), are replaced by their hash: equal stays equal."""


class CodecError(ValueError):
    """Not a value of the core, or none that this version knows."""


def encode(value: object) -> Any:
    """Return ``value`` in terms of JSON.

    Raises:
        CodecError: it is, or holds, something else than a value of the core.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Not str(value), which never lets go of an integer of 2**62 or more where mypyc compiled it.
        return value if abs(value) <= _LARGEST_INT else {"type": "int", "value": f"{value}"}
    if isinstance(value, float):
        return value if isfinite(value) else {"type": "float", "value": str(value)}
    name = type(value).__name__
    if isinstance(value, StrEnum) and name in _known().enums:
        return {"type": name, "value": value.value}
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"sha256:{sha256(value.encode(errors='replace')).hexdigest()}"
    if isinstance(value, bytes):
        return {"type": "bytes", "value": value.hex()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return {"type": "set", "items": [encode(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return {"type": "map", "items": [[encode(key), encode(item)] for key, item in value.items()]}
    if (names := _known().fields.get(type(value))) is not None:
        return {"type": name} | {field: encode(getattr(value, field)) for field in names}
    raise CodecError(f"no value of the core: {type(value).__qualname__}")


def decode(told: Any) -> Any:
    """Return the value of which ``told`` is the encoding; sequences come back as tuples.

    Raises:
        CodecError: it is no such encoding.
    """
    if isinstance(told, list):
        return tuple(decode(item) for item in told)
    if not isinstance(told, dict):
        return told
    try:
        name = told["type"]
        if name == "float":
            return float(told["value"])
        if name == "int":
            return int(told["value"])
        if name == "bytes":
            return bytes.fromhex(told["value"])
        if name == "set":
            return frozenset(map(decode, told["items"]))
        if name == "map":
            return {decode(key): decode(item) for key, item in told["items"]}
        if name in _known().enums:
            return _known().enums[name](told["value"])
        return _known().values[name](**{field: decode(item) for field, item in told.items() if field != "type"})
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CodecError(f"not understood: {type(error).__name__} {error} in {str(told)[:200]}") from error


class _Classes:
    """Every public enumeration and every frozen dataclass of the core, by name."""

    def __init__(self) -> None:
        modules = [import_module(f"{core.__name__}.{found.name}") for found in iter_modules(core.__path__)]
        classes = [c for module in modules for c in vars(module).values() if _is_of(c, module.__name__)]
        self.enums: dict[str, type[StrEnum]] = {c.__name__: c for c in classes if issubclass(c, StrEnum)}
        self.values: dict[str, type] = {c.__name__: c for c in classes if _is_value(c)}
        self.fields = {c: tuple(field.name for field in fields(c)) for c in self.values.values()}


@cache
def _known() -> _Classes:
    return _Classes()  # not before it is asked for: modules of the core may import this one


def _is_of(value: object, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and not value.__name__.startswith("_")


def _is_value(cls: type) -> bool:
    return is_dataclass(cls) and bool(getattr(cls, "__dataclass_params__").frozen)  # noqa: B009 - unknown to mypy
