"""Who sent a request, for fair shares and for metrics.

A tenant is told by the header ``x-slai-tenant`` where a trusted front sets it, else by the client's API key, else it is
the one nameless tenant. Keys are told apart by a hash under a secret of this process, and never kept, logged or shown.
The proxy does not check keys. So only those named in the settings count, unless whoever runs it says that something in
front does: a client that makes up a key for every request would have a share for each.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.wire.keys import presented_key
from proxy.wire.openai import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multidict import MultiMapping

TENANT_HEADER = "x-slai-tenant"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class TenantSource(StrEnum):
    """What tells a tenant."""

    NONE = "none"
    """Nothing: all requests come out of one share."""
    NAMED = "named"
    """The API key (``Authorization: Bearer`` or ``x-api-key``), if the settings name it; all others are one tenant."""
    KEY = "key"
    """The API key, whatever it is: for where something in front checks keys."""
    HEADER = "header"
    """The header ``x-slai-tenant``, which clients must not be able to set themselves; without it, the key if named."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tells a request's tenant. ``names``: tenants by the SHA-256 of their API keys, in lower-case hex."""

    source: TenantSource
    secret: bytes = field(repr=False)
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, headers: MultiMapping[str]) -> str:
        """Return the tenant's name, ``key:`` and a hash for a key without a name, or ``""``.

        Raises:
            BadRequest: the header is trusted, and is not 1 to 64 letters, digits, ``.``, ``_`` and ``-``.
        """
        if self.source is TenantSource.NONE:
            return ""
        if self.source is TenantSource.HEADER and (name := headers.get(TENANT_HEADER)) is not None:
            if not _NAME.fullmatch(name):
                told = f"{TENANT_HEADER} must be 1 to 64 letters, digits, '.', '_' and '-'"
                raise BadRequest(told, param=TENANT_HEADER)
            return name
        if not self.names and self.source is not TenantSource.KEY:
            return ""
        key = presented_key(headers)
        if not key:
            return ""
        name = self.names.get(hashlib.sha256(key).hexdigest()) if self.names else None
        if name is None and self.source is not TenantSource.KEY:
            return ""
        return name or f"key:{hashlib.blake2b(key, key=self.secret, digest_size=12).hexdigest()}"
