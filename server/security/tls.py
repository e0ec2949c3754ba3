"""TLS by the server itself, for networks without a proxy that does it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path


class TLSFault(Exception):
    """A certificate that cannot be used; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class TLSSettings:
    certfile: Path
    """In PEM: the server's certificate, and those between it and the root behind it."""
    keyfile: Path | None = None
    """Its private key; None: it is in `certfile`, too."""
    password: str | None = field(default=None, repr=False)
    """Of the private key, where it is encrypted."""


def make_context(settings: TLSSettings) -> ssl.SSLContext:
    """TLS 1.2 or newer. Raises: TLSFault."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: TLSSettings) -> None:
    """Connections from now on get it; where it cannot be read, those before stay in use.

    Raises: TLSFault.
    """
    key = settings.keyfile or settings.certfile
    for path in (settings.certfile, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise TLSFault(f"{path} cannot be read: {error.strerror or error}.") from None
    # Tried apart: half a change would leave a certificate without its key.
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)
    _load(context, settings)


def _load(context: ssl.SSLContext, settings: TLSSettings) -> None:
    # Never the terminal, where OpenSSL would ask for a password that is missing.
    password = settings.password or ""
    try:
        context.load_cert_chain(settings.certfile, settings.keyfile, lambda: password)
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        names = " and ".join(str(path) for path in (settings.certfile, settings.keyfile) if path)
        raise TLSFault(
            f"{names} hold no certificate with its private key, or the password is wrong: {reason}."
        ) from None
