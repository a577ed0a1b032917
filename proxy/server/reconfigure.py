"""Putting other settings in force in all parts of a running proxy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from proxy.core.events import Reconfigured
from proxy.server.app import GENERATOR, PASS_THROUGH, PROXY
from proxy.server.bodies import BODY_SECONDS, UPLOADS
from proxy.server.connections import connection_limits
from proxy.tls import load_certificate
from proxy.upstream.client import Timeouts
from proxy.upstream.sources import split

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

    from proxy.config import Settings
    from proxy.server.files import Files


def put_in_force(app: web.Application, new: Settings, files: Files, tls: ssl.SSLContext | None) -> None:
    """Change everything in an application at once. ``tls`` is the context of its listener.

    Raises:
        ConfigError: the certificate does not hold any more; nothing has changed.
    """
    proxy, generator = app[PROXY], app[GENERATOR]
    old = proxy.settings
    if tls is not None and new.tls_cert is not None:
        load_certificate(tls, new.tls_cert, new.tls_key, "tls_cert")
    proxy.settings = new
    classes = new.request_classes()
    proxy.metrics.know(classes, new.tenants)
    generator.classes, generator.default_class = classes, classes[new.default_class]
    generator.tenants = new.tenant_reader(generator.tenants.secret)
    generator.aliases = app[PASS_THROUGH].aliases = new.aliases
    app[PASS_THROUGH].administration = new.engine_administration
    proxy.access.change(files.keys)
    proxy.debug_key = files.debug_key
    proxy.connections.limits = connection_limits(new)
    app[BODY_SECONDS][0], app[UPLOADS].most_bytes = new.body_timeout_seconds, new.max_upload_bytes
    proxy.client.timeouts = Timeouts(new.connect_timeout_seconds, new.idle_timeout_seconds)
    proxy.trust.keys = files.trust.keys
    if old.engine_tls_ca or old.engine_tls_cert or files.trust.tls is not None:
        proxy.trust.tls = files.trust.tls
        proxy.client.reconnect()
        proxy.prober.reconnect()
    if (old.token_budget, old.max_num_seqs, old.kv_tokens) != (new.token_budget, new.max_num_seqs, new.kv_tokens):
        proxy.prober.limits = new.engine_limits
    if old.engines != new.engines:
        proxy.discovery.configure(*split(new.engines, new.discovery_interval_seconds))
    if old.scheduler_config() != new.scheduler_config():
        proxy.driver.feed(Reconfigured(new.scheduler_config()))
    if old.log_level != new.log_level:
        logging.getLogger().setLevel(new.log_level.upper())
