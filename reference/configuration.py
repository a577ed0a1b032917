"""docs/configuration.md: every setting, as ``proxy/config.py`` declares it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.config import ENVIRONMENT_PREFIX, Settings
from proxy.configload import ENTRIES
from proxy.flags import SECTIONS, placeholder
from proxy.server.reload import LIVE
from reference.markdown import flowing, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

_INTRODUCTION = f"""\
# Configuration

Made from `proxy/config.py` by `make reference`.

Each setting is a key of the YAML file that `--config` names (`max_num_seqs`), an environment variable (`{ENVIRONMENT_PREFIX}MAX_NUM_SEQS`) and a
flag of `slai-proxy serve` (`--max-num-seqs`; what is on or off is `--tiles` and `--no-tiles`). Flags win over the environment, the environment over
the file. `slai-proxy config` prints what would hold and where each value comes from; `slai-proxy check-config` says whether it does.

A `live` setting takes effect while the proxy runs, when the file changes or on SIGHUP ([how](security.md#settings-that-change-while-it-runs));
the others want a restart."""
_KIB = 1 << 10


def render() -> str:
    """Return the page."""
    return "\n\n".join((_INTRODUCTION, *_sections(), *_entries())) + "\n"


def _sections() -> Iterator[str]:
    sections: dict[str, list[list[str]]] = {}
    title = "the file itself"
    for name, field in Settings.model_fields.items():
        title = SECTIONS.get(name, title)
        what = flowing(field.description or "")
        live = "live" if name in LIVE else ""
        sections.setdefault(title, []).append([f"`{name}`", _value(name, field), _default(name, field), live, what])
    for title, rows in sections.items():
        yield f"## {title[0].upper()}{title[1:]}"
        yield table(("key", "value", "default", "", ""), rows)


def _entries() -> Iterator[str]:
    for name, entry in ENTRIES.items():
        yield f"## Entries of `{name}`"
        yield flowing(entry.__doc__ or "")
        rows = [
            [f"`{key}`", _default(key, field), flowing(field.description or "")]
            for key, field in entry.model_fields.items()
        ]
        yield table(("key", "default", ""), rows)


def _value(name: str, field: FieldInfo) -> str:
    if field.annotation is bool:
        return "on, off"
    text = placeholder(name, field.annotation)
    return ", ".join(f"`{word}`" for word in text[1:-1].split(",")) if text.startswith("{") else text


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    match field.get_default(call_default_factory=True):
        case None:
            return ""
        case bool(value):
            return "on" if value else "off"
        case dict() | tuple() as value:
            return ", ".join(f"`{key}`" for key in value)
        case int(value) if name.endswith("_bytes"):
            return _bytes(value)
        case int(value):
            return f"{value:,}" if name != "port" else str(value)
        case float(value):
            return f"{value:g}"
        case value:
            return f"`{value}`"


def _bytes(number: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number % _KIB or number < _KIB:
            return f"{number} {unit}"
        number //= _KIB
    return f"{number} GiB"
