"""API keys as clients send them, and what each may do.

Keys are known by their SHA-256 only. A key is random and long, so a plain hash of it tells nothing and can be looked
up in a table: where two hashes begin to differ, which the time of a look-up might show, an attacker cannot steer and
cannot work back from. The hash that is found is compared once more in constant time, so that nothing hangs on that.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multidict import istr

from proxy.core.quota import QuotaLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from multidict import MultiMapping

CREDENTIALS = frozenset({"authorization", "x-api-key", "api-key"})
"""Headers by which clients of OpenAI, Anthropic and Azure send their keys, in lower case."""

API_KEY = istr("x-api-key")
_AUTHORIZATION, _AZURE_KEY = istr("Authorization"), istr("api-key")

LONGEST_KEY = 4096

_ENGINE_ADMINISTRATION = (
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/server_info",
    "/start_profile",
    "/stop_profile",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/init_weight_transfer_engine",
    "/update_weights",
    "/get_world_size",
    "/invocations",
    "/kv_event_sources",
    "/inference/v1/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/metrics",
    "/load",
    "/docs",
    "/redoc",
    "/openapi.json",
)


@dataclass(frozen=True, slots=True)
class Key:
    """One API key of the settings."""

    name: str
    """What logs and metrics call it."""
    sha256: str = field(repr=False)
    tenant: str
    classes: tuple[str, ...] = ()
    """Classes that it may ask for, the first by default; empty: all."""
    models: tuple[str, ...] = ()
    """Models that it may use, or beginnings of their names before a ``*``; empty: all."""
    limits: QuotaLimits = field(default_factory=QuotaLimits)
    admin: bool = False

    def may_use(self, model: str) -> bool:
        """Whether it may use ``model``; with models named, a request that names none cannot be let through."""
        if not self.models:
            return True
        return any(model.startswith(m[:-1]) if m.endswith("*") else model == m for m in self.models) and bool(model)


class KeyRing:
    """The keys that there are."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.sha256: key for key in keys}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, presented: bytes) -> Key | None:
        """The key that a client presents, if it is known."""
        digest = hashlib.sha256(presented).hexdigest()
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.sha256, digest) else None


def presented_key(headers: MultiMapping[str]) -> bytes:
    """The key that a request carries, as ``Authorization: Bearer`` or ``x-api-key``; empty if there is none."""
    scheme, _, token = headers.get(_AUTHORIZATION, "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get(API_KEY, "") or headers.get(_AZURE_KEY, "")
    return key[:LONGEST_KEY].encode("utf-8", "surrogateescape")


def is_engine_administration(path: str) -> bool:
    """Whether a path changes an engine for all its clients, or shows what others do there."""
    plain = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
    return plain.rstrip("/") in _ENGINE_ADMINISTRATION or ".." in plain.split("/")
