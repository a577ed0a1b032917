"""What an entry of ``--engines`` means: an engine, or a source of engines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.upstream.discovery import check_base_url
from proxy.upstream.discovery_dns import AddressSource, ServiceRecordSource
from proxy.upstream.discovery_file import FileSource
from proxy.upstream.discovery_kubernetes import KubernetesSource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.upstream.discovery import Source

KINDS = "http://HOST:PORT, dns+http://NAME:PORT, srv+http://NAME, file:PATH, k8s+http://SERVICE.NAMESPACE:PORT"


def check_entry(entry: str) -> str:
    """Return an entry as it is kept.

    Raises:
        ValueError: it means nothing; the message says why.
    """
    entry = entry.strip()
    if is_engine(entry):
        return check_base_url(entry)
    _source(entry, 1.0)
    return entry


def is_engine(entry: str) -> bool:
    """Whether an entry is an engine itself."""
    scheme = entry.partition(":")[0]
    return scheme in {"http", "https"} or not scheme.startswith(("dns", "srv", "file", "k8s"))


def split(entries: Iterable[str], interval_seconds: float) -> tuple[list[str], dict[str, Source]]:
    """Part checked entries into engines and sources, by entry; those are looked at every ``interval_seconds``."""
    entries = list(entries)
    engines = [entry for entry in entries if is_engine(entry)]
    return engines, {entry: _source(entry, interval_seconds) for entry in entries if not is_engine(entry)}


def _source(entry: str, interval_seconds: float) -> Source:
    if entry.startswith("file:"):
        path = entry.removeprefix("file:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or path.startswith("//"):
            raise ValueError(f"{entry!r} names no file; like file:/etc/slai-proxy/engines.yaml")
        return FileSource(Path(path), interval_seconds)
    parts = urlsplit(entry)
    kind, _, inner = parts.scheme.partition("+")
    if inner == "https":
        raise ValueError(f"{entry!r}: engines found by {kind} are called by address, for which no certificate holds")
    host, colon, port = parts.netloc.rpartition(":")
    if not colon:
        host, port = parts.netloc, ""
    prefix = parts.path.rstrip("/")
    if inner != "http" or not host or "@" in host or parts.query or parts.fragment or prefix.endswith("/v1"):
        raise ValueError(f"{entry!r} is no engine and no source of engines; there are {KINDS}")
    if kind == "dns":
        if not port.isdigit() or not 0 < int(port) <= 65535:
            raise ValueError(f"{entry!r}: a port is missing, like dns+http://vllm.internal:8000")
        return AddressSource(host.strip("[]"), int(port), prefix, interval_seconds)
    if kind == "srv":
        if port:
            raise ValueError(f"{entry!r}: a service record tells the port itself")
        _need("dns", "dns", entry)
        return ServiceRecordSource(host, prefix, interval_seconds)
    if kind == "k8s":
        _need("kubernetes", "k8s", entry)
        service, _, namespace = host.partition(".")
        return KubernetesSource(service, namespace, port, prefix)
    raise ValueError(f"{entry!r} is no engine and no source of engines; there are {KINDS}")


def _need(package: str, extra: str, entry: str) -> None:
    if find_spec(package) is None:
        raise ValueError(f"{entry!r} needs: pip install 'slai-proxy[{extra}]'")
