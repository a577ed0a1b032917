"""Engines of a Kubernetes service: its ready endpoints, as the API server tells them (EndpointSlices).

They are listed and then watched. When a watch ends or falls behind (410 Gone) they are listed anew, so nothing that
happened in between is missed. Needs the extra ``k8s``, and the right to list and watch ``endpointslices``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.upstream.discovery import SourceError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from proxy.upstream.discovery import Urls

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WATCH_SECONDS = 300
_LIST_SECONDS = 10.0
_GONE = 410


class KubernetesSource:
    """The ready endpoints of ``service``, at its port of the name or number ``port`` (or its only one, if empty)."""

    def __init__(self, service: str, namespace: str, port: str, prefix: str) -> None:
        self._service, self._namespace, self._port, self._prefix = service, namespace, port, prefix

    async def watch(self) -> AsyncGenerator[Urls]:
        """See ``Source``."""
        from kubernetes.aio import client, config, watch  # noqa: PLC0415 - of an extra

        namespace = self._namespace
        try:
            if _NAMESPACE_FILE.exists():  # noqa: ASYNC240 - a file in memory, once
                config.load_incluster_config()
                namespace = namespace or _NAMESPACE_FILE.read_text(encoding="utf-8").strip()  # noqa: ASYNC240
            else:
                await config.load_kube_config()
        except (config.ConfigException, OSError) as error:
            raise SourceError(f"no access to a Kubernetes API: {error}") from None
        namespace = namespace or "default"
        label = f"kubernetes.io/service-name={self._service}"
        async with client.ApiClient() as connection:
            api = client.DiscoveryV1Api(connection)
            while True:
                slices: dict[str, Urls] = {}
                try:
                    async with asyncio.timeout(_LIST_SECONDS):
                        found = await api.list_namespaced_endpoint_slice(namespace, label_selector=label)
                    slices = {item.metadata.name: self._urls(item) for item in found.items}
                    yield _all(slices.values())
                    async with watch.Watch() as changes:
                        async for change in changes.stream(
                            api.list_namespaced_endpoint_slice,
                            namespace,
                            label_selector=label,
                            resource_version=found.metadata.resource_version,
                            timeout_seconds=_WATCH_SECONDS,
                        ):
                            item = change["object"]
                            if change["type"] == "DELETED":
                                slices.pop(item.metadata.name, None)
                            elif change["type"] in {"ADDED", "MODIFIED"}:
                                slices[item.metadata.name] = self._urls(item)
                            yield _all(slices.values())
                except client.ApiException as error:
                    if error.status != _GONE:
                        raise SourceError(f"the Kubernetes API answers {error.status} {error.reason}") from None
                except SourceError:
                    raise
                except Exception as error:  # noqa: BLE001 - of whatever the client is made of
                    why = str(error) or type(error).__name__
                    raise SourceError(f"the Kubernetes API cannot be reached: {why}") from None

    def _urls(self, item: Any) -> Urls:
        """Return the engines of one EndpointSlice."""
        ports = [p for p in item.ports or () if self._port in {"", p.name or "", str(p.port)}]
        if self._port and item.endpoints and not ports:
            raise SourceError(f"service {self._service} has no port {self._port}")
        hosts = [
            address
            for endpoint in item.endpoints or ()
            # Of one that tells nothing it is to be assumed that it is ready, says the API's description.
            if endpoint.conditions is None or endpoint.conditions.ready is not False
            for address in endpoint.addresses
        ]
        return frozenset(f"http://{f'[{h}]' if ':' in h else h}:{ports[0].port}{self._prefix}" for h in hosts if ports)


def _all(slices: Iterable[Urls]) -> Urls:
    return frozenset[str]().union(*slices)
