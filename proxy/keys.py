"""API keys in the settings: their hashes, whose they are and what they may use."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from proxy.configfile import ConfigError, read_config_file
from proxy.core.quota import QuotaLimits
from proxy.entries import Limit  # noqa: TC001 - pydantic reads it
from proxy.mistakes import explain
from proxy.wire.keys import Key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PREFIX = "sk-slai-"

KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Names = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class KeySettings(BaseModel):
    """One API key: the SHA-256 (hex) of it, whose it is, and what it may use (``None`` and empty: anything)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sha256: Digest
    """SHA-256 of the key, in hex."""
    tenant: KeyName | None = None
    """Who shares the engines with the others by it; the key's own name if left out."""
    classes: Names = ()
    """Classes that it may ask for; the first is that of requests that ask for none."""
    models: Names = ()
    """Models that it may use; a ``*`` at the end stands for anything."""
    requests_per_minute: Limit | None = None
    """A bucket of a minute's worth, full at first."""
    tokens_per_minute: Limit | None = None
    """Prompt and output."""
    concurrency: Limit | None = None
    """Requests at once."""
    admin: bool = False
    """May also use the engines' own administration (sleep, LoRA adapters, profiling, ...) through the proxy."""

    def key(self, name: str) -> Key:
        limits = QuotaLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)
        return Key(name, self.sha256, self.tenant or name, self.classes, self.models, limits, self.admin)


KeyTable = dict[KeyName, KeySettings]
_TABLE = TypeAdapter(KeyTable)


def read_keys(inline: Mapping[str, KeySettings], path: Path | None, classes: Mapping[str, object]) -> list[Key]:
    """Return the keys of the settings and of the keys file together.

    Raises:
        ConfigError: the file cannot be used, a key is there twice, or one names a class that there is not.
    """
    table = dict(inline)
    if path is not None:
        file = read_config_file(path, "keys by their names")
        where = dict.fromkeys(file.values, f"file {path}")
        try:
            from_file = _TABLE.validate_python(file.values)
        except ValidationError as error:
            raise ConfigError(
                explain(error, where, file.line, (), dict.fromkeys(where, KeySettings.model_fields))
            ) from None
        if both := sorted(table.keys() & from_file.keys()):
            raise ConfigError(f"keys: {both[0]} is in {path} and in the settings")
        table |= from_file
    names: dict[str, str] = {}
    for name, key in table.items():
        if (other := names.setdefault(key.sha256, name)) != name:
            raise ConfigError(f"keys: {other} and {name} are the same key")
        if missing := [c for c in key.classes if c not in classes]:
            raise ConfigError(f"keys: {name} names the class {missing[0]!r}, which is none of {', '.join(classes)}")
    return [key.key(name) for name, key in table.items()]


def new_key() -> str:
    """Make an API key: 256 random bits, so that its plain SHA-256 can be kept.

    Slow hashes with salt are for passwords, which can be guessed. Nobody guesses this; and a hash that took long for
    every request would be a means to overload the proxy.
    """
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """The SHA-256 of a key, as the settings have it."""
    return hashlib.sha256(key.encode()).hexdigest()
