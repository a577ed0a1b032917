"""What the settings name files for: API keys, TLS, keys to engines. All are read together, so that all of them hold."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.configfile import ConfigError
from proxy.store.address import with_password
from proxy.tls import client_context, server_context
from proxy.upstream.credentials import EngineKeys, EngineTrust, read_engine_keys

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from pydantic import SecretStr

    from proxy.config import Settings
    from proxy.wire.keys import Key


@dataclass(frozen=True, slots=True)
class DebugKey:
    """The one key of the debug port, as its hash."""

    sha256: bytes

    def opens(self, presented: bytes) -> bool:
        """Whether it is the key; the time that it takes tells nothing of it."""
        return hmac.compare_digest(hashlib.sha256(presented).digest(), self.sha256)


@dataclass(frozen=True, slots=True)
class Files:
    """What was found in them."""

    keys: list[Key] | None
    """``None``: no key is needed."""
    tls: ssl.SSLContext | None
    trust: EngineTrust
    debug_key: DebugKey | None
    store_url: str | None = field(default=None, repr=False)
    """Where replicas meet, with the password of that server. What it is at the start stays."""


def read_files(settings: Settings) -> Files:
    """Read all files that the settings name.

    Raises:
        ConfigError: one of them cannot be used.
    """
    tls = None if settings.tls_cert is None else server_context(settings.tls_cert, settings.tls_key)
    engine_keys = EngineKeys() if settings.engine_key_file is None else read_engine_keys(settings.engine_key_file)
    engine_tls = None
    named = settings.engine_tls_ca, settings.engine_tls_cert
    verify = settings.engine_tls_verify
    if any(url.startswith("https:") for url in settings.engines) or any(named) or not verify:
        engine_tls = client_context(*named, settings.engine_tls_key, verify=verify)
    return Files(
        keys=settings.read_keys() if settings.needs_keys else None,
        tls=tls,
        trust=EngineTrust(engine_keys, engine_tls),
        debug_key=None if settings.debug_key_file is None else _read_debug_key(settings.debug_key_file),
        store_url=None if settings.redis is None else _store_url(settings.redis, settings.redis_password_file),
    )


def named_files(settings: Settings) -> list[Path]:
    """All files that the settings name and that are read anew when they change, the configuration file with them."""
    found = (
        settings.config,
        settings.keys_file,
        settings.tls_cert,
        settings.tls_key,
        settings.engine_key_file,
        settings.engine_tls_ca,
        settings.engine_tls_cert,
        settings.engine_tls_key,
        settings.debug_key_file,
    )
    return [path for path in found if path is not None]


def _read_debug_key(path: Path) -> DebugKey:
    return DebugKey(hashlib.sha256(_read_one(path, "key")).digest())


def _store_url(url: SecretStr, password_file: Path | None) -> str:
    plain = url.get_secret_value()
    if password_file is None:
        return plain
    try:
        return with_password(plain, _read_one(password_file, "password").decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{password_file}: not text") from None


def _read_one(path: Path, what: str) -> bytes:
    """Read a file that holds one secret and nothing else."""
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not found or len(found.split()) != 1:
        raise ConfigError(f"{path}: expected one {what} and nothing else")
    return found
