"""What traces and metrics are of: this process, by the names of OpenTelemetry's resources."""

from __future__ import annotations

import uuid

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from proxy import __version__

_INSTANCE = uuid.uuid4().hex


def our_resource() -> Resource:
    """Return it; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` have the last word."""
    ours = {"service.name": "slai-proxy", "service.version": __version__, "service.instance.id": _INSTANCE}
    return Resource.create(ours).merge(OTELResourceDetector().detect())
