"""Where settings come from: command-line flags over environment over YAML file over defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from proxy.config import ENVIRONMENT_PREFIX, Settings
from proxy.configfile import ConfigError, ConfigFile, read_config_file
from proxy.core.rad import tile_advice
from proxy.core.tiles import budget_advice
from proxy.entries import ClassSettings, TenantSettings
from proxy.flags import read_flags
from proxy.keys import KeySettings
from proxy.mistakes import explain, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel

_STATE_UNUSED = "--state-dir is not used for simulated engines of our own"
_TILES_UNUSED = (
    "--tiles has no effect on simulated engines of our own; to try it, start slai-proxy engine --ports 8101,8102"
    " --token-budget 8192, and serve those that it names with its flags and --tiles"
)
ENTRIES: dict[str, type[BaseModel]] = {"classes": ClassSettings, "tenants": TenantSettings, "keys": KeySettings}
"""What the entries of settings that are tables may have."""


def advice(settings: Settings, sources: Mapping[str, str]) -> list[str]:
    """Return what to tell whoever made these settings: all right, but not as good as they could be."""
    # Nobody but the engine's owner knows its budget; our default says nothing of it.
    known = sources["token_budget"] != "default"  # noqa: S105 - no password
    told = (
        tile_advice(settings.token_budget) if known else None,
        budget_advice(settings.token_budget) if settings.tiles and settings.engines else None,
        _TILES_UNUSED if settings.tiles and not settings.engines else None,
        None if settings.engines or settings.state_dir is None else _STATE_UNUSED,
    )
    return [line for line in told if line is not None]


def load_settings(arguments: Sequence[str], program: str, what: str = "") -> tuple[Settings, dict[str, str]]:
    """Merge flags, environment, file and defaults; also return where each value came from, by key.

    ``what`` tells in the help what the program does.

    Raises:
        ConfigError: a value or key is wrong, or the file cannot be read.
        SystemExit: the flags do not parse, or they ask for help (as argparse does).
    """
    flags = read_flags(Settings, arguments, program, what, repeatable=("engines",))
    environment = EnvSettingsSource(Settings)()
    unknown = [
        k for k in _environment_keys() if k.removeprefix(ENVIRONMENT_PREFIX).lower() not in Settings.model_fields
    ]
    if unknown:
        near = suggestion(unknown[0], (ENVIRONMENT_PREFIX + name.upper() for name in Settings.model_fields))
        raise ConfigError(f"environment: {', '.join(unknown)} is no setting{near or '; see --help for those that are'}")
    path = flags.get("config") or environment.get("config")
    file = read_config_file(Path(path)) if path else ConfigFile()
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for name, source in ((f"file {path}", file.values), ("environment", environment), ("flag", flags)):
        values |= source
        sources |= dict.fromkeys(source, name)
    try:
        return Settings(**values), sources
    except ValidationError as error:
        raise ConfigError(
            explain(error, sources, file.line, Settings.model_fields, {n: e.model_fields for n, e in ENTRIES.items()})
        ) from None


def _environment_keys() -> list[str]:
    return sorted(key for key in os.environ if key.startswith(ENVIRONMENT_PREFIX))
