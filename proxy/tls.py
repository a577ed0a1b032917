"""TLS, towards clients and towards engines: version 1.2 or later, and the peer's name checked."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from proxy.configfile import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return what a listener shows to its clients; ``key`` may be in the file of the certificate.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, certificate, key, "tls_cert")
    return context


def client_context(
    authorities: Path | None, certificate: Path | None, key: Path | None, *, verify: bool = True
) -> ssl.SSLContext:
    """Return what to trust in engines, and to show to them.

    Args:
        authorities: certificates of the only authorities to trust; the system's own if ``None``.
        certificate: what to show to engines that ask, with its ``key``.
        key: as in ``server_context``.
        verify: whether to check who an engine is at all.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:  # an SSLError is one
        raise ConfigError(f"engine_tls_ca: cannot use {authorities}: {_told(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        load_certificate(context, certificate, key, "engine_tls_cert")
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None, setting: str) -> None:
    """Put a certificate into a context; connections that are there keep the one before.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """

    def no_password() -> str:  # or OpenSSL would ask for it on the terminal
        raise ConfigError(f"{setting}: the key is protected by a password, which cannot be given")

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot use {certificate} with {key or 'itself'}: {_told(error)}") from None


def _told(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate in PEM").lower().replace("_", " ")
    return error.strerror or str(error)
