"""The proxy's own keys to engines: from a file, sent to the engine that they are for, shown to nobody."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.configfile import ConfigError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping
    from pathlib import Path

_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Keys by the base URL of an engine, and the one for all others."""

    by_url: Mapping[str, str] = field(default_factory=dict, repr=False)
    default: str | None = field(default=None, repr=False)

    def of(self, base_url: str) -> str | None:
        """The key to send to an engine; ``None`` if none is known for it."""
        return self.by_url.get(base_url, self.default)

    def headers(self, base_url: str) -> dict[str, str]:
        """The header that carries it, if there is one."""
        key = self.of(base_url)
        return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass(slots=True)
class EngineTrust:
    """What engines are shown, and what is expected of them; another one can take its place while it is used."""

    keys: EngineKeys = field(default_factory=EngineKeys)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """For https engines; the system's own rules if ``None``."""


def read_engine_keys(path: Path) -> EngineKeys:
    """Read a file with a key in a line, for all engines, or with lines of an engine's base URL and its key.

    Raises:
        ConfigError: the file cannot be read or understood. The message holds nothing of it but numbers of lines.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text") from None
    by_url: dict[str, str] = {}
    default: str | None = None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or not _KEY.fullmatch(words[-1]):
            raise ConfigError(f"{path}, line {number}: neither KEY nor URL KEY")
        if len(words) == 2:
            by_url[words[0].rstrip("/")] = words[1]
        elif default is None:
            default = words[0]
        else:
            raise ConfigError(f"{path}, line {number}: a second key for all engines")
    if default is None and not by_url:
        raise ConfigError(f"{path}: there is no key in it")
    return EngineKeys(by_url, default)
