"""The settings as flags of a command line: what they are called, how they are explained, what was given."""

from __future__ import annotations

import argparse
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from proxy.mistakes import suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_DESCRIPTION = """\
Every flag is also an environment variable (--max-num-seqs is SLAI_MAX_NUM_SEQS) and a key of the YAML file given by
--config (max_num_seqs); flags win over the environment, the environment over the file."""

_VALUES = {
    "config": "FILE",
    "engines": "URL[,URL]",
    "aliases": "NAME=MODEL[,..]",
    "host": "ADDRESS",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "engine_key_file": "FILE",
    "engine_tls_ca": "FILE",
    "engine_tls_cert": "FILE",
    "engine_tls_key": "FILE",
    "debug_host": "ADDRESS",
    "debug_key_file": "FILE",
    "classes": "JSON",
    "default_class": "NAME",
    "tenants": "JSON",
    "keys": "JSON",
    "keys_file": "FILE",
    "decision_log": "FILE",
    "redis": "URL",
    "redis_password_file": "FILE",
    "redis_pool": "NAME",
    "state_dir": "DIR",
    "otlp_endpoint": "URL",
}
# Where a section of the help begins: the settings are declared in this order, and a new one falls into its neighbours'.
SECTIONS = {
    "engines": "engines, and where they are found",
    "host": "addresses, TLS and the engines' keys",
    "token_budget": "the engines' own limits, as they were started with",
    "policy": "order, queue and release",
    "redis": "a fleet of proxies",
    "tiles": "tiles",
    "classes": "classes, tenants and API keys",
    "max_body_bytes": "limits on clients, and time limits",
    "decision_log": "logs, debugging and traces",
    "sim_engines": "simulated engines, where no --engines are given",
}
_UNITS = ("seconds", "tokens", "bytes", "port")


class _Parser(argparse.ArgumentParser):
    """Knows what was meant by a flag that there is not."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        super().error(message + (suggestion(unknown, known) if unknown else ""))


def read_flags(
    settings: type[BaseModel], arguments: Sequence[str], program: str, what: str, *, repeatable: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what flags give, as text; those left out are left out. ``what`` tells what the program does.

    Raises:
        SystemExit: the flags do not parse, or they ask for help (as argparse does).
    """
    parser = _Parser(
        prog=program, usage=f"{program} [FLAG ...]", description=f"{what} {_DESCRIPTION}", allow_abbrev=False
    )
    section: argparse._ActionsContainer = parser
    for name, field in settings.model_fields.items():
        if name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        flag, explained = f"--{name.replace('_', '-')}", _explained(field).replace("%", "%%")
        if field.annotation is bool:
            section.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=explained
            )
        else:
            action = "append" if name in repeatable else "store"
            value = placeholder(name, field.annotation)
            section.add_argument(
                flag, dest=name, action=action, default=argparse.SUPPRESS, metavar=value, help=explained
            )
    return vars(parser.parse_args(arguments))


def placeholder(name: str, annotation: Any) -> str:
    """Return what stands for a setting's value where it is explained."""
    if get_origin(annotation) is Literal:
        return f"{{{','.join(map(str, get_args(annotation)))}}}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return f"{{{','.join(annotation)}}}"
    unit = name.rpartition("_")[2]
    return _VALUES.get(name) or (unit.upper() if unit in _UNITS else "NUMBER")


def _explained(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None:  # what that means is in the description
        return field.description or ""
    if isinstance(default, dict | tuple):
        default = " and ".join(map(str, default)) or "none"
    elif isinstance(default, bool):
        default = "on" if default else "off"
    return f"{field.description} (default: {default})"
