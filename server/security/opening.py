"""What is settled before a server listens: that it may, with which keys, and for which names."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace

from chairlift.server.security.exposure import is_loopback, refusal
from chairlift.server.security.settings import SecuritySettings
from chairlift.server.security.tls import make_context

logger = logging.getLogger("chairlift.server")


class Exposed(Exception):
    """The address can be reached by others, and there is no key."""


def open_safely(host: str, port: int, settings: SecuritySettings) -> SecuritySettings:
    """The settings, with what depends on the address.

    Raises:
        Exposed: others could connect, and would need no key.
        KeyFault: the keys cannot be used.
        TLSFault: the certificate cannot.
        OSError: there is no such host.
    """
    protected = bool(settings.keys.read())
    if settings.tls is not None:
        make_context(settings.tls)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for *_, address in found]
    why = refusal(host, addresses, protected=protected, insecure=settings.insecure)
    if why is not None:
        raise Exposed(why)
    local = all(map(is_loopback, addresses))
    if not local and settings.tls is None:
        logger.info("Requests and keys travel unencrypted: docs/security.md, TLS.")
    return replace(settings, allowed_hosts=allowed_hosts(settings.allowed_hosts, local and not protected))


def allowed_hosts(asked: Sequence[str] | None, reaches_only_here: bool) -> tuple[str, ...] | None:
    """Where whoever can connect may ask, and only this machine can connect, names from elsewhere lead here by
    DNS rebinding alone."""
    if asked:
        return tuple(asked)
    return () if reaches_only_here else None
