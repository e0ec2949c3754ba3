"""Names of hosts and of web pages."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

_HOST = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
RESERVED = (".localhost", ".internal")
"""Ends of names that nobody can register (RFC 6761; ICANN, 2024), so that no page has one from outside."""


def host_name(value: str) -> str | None:
    """Of a `Host` header, in small letters, without its port; None where it is no host."""
    match = _HOST.fullmatch(value)
    if match is None:
        return None
    return (match["six"] or match["name"]).lower().rstrip(".")


def is_own(name: str) -> bool:
    """A name that no page from elsewhere can be served under: this machine's, or a numeric address."""
    if name == "localhost" or name.endswith(RESERVED):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return name in (own, own.partition(".")[0] + ".local")
    return True


def is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """Args: allowed: names, `*.example.org` for all below one, `*` for all."""
    return is_own(name) or any(
        pattern == "*" or name == pattern or (pattern[:2] == "*." and name.endswith(pattern[1:]))
        for pattern in allowed
    )


def check_host_pattern(text: str) -> str:
    """Raises: ValueError: it is no name or pattern."""
    name = text.strip().lower().rstrip(".")
    if name != "*" and not re.fullmatch(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", name):
        raise ValueError(
            f"{text!r} is no host name such as llm.example.org or *.example.org (without a port)."
        )
    return name


def check_origin(text: str) -> str:
    """Raises: ValueError: it is no origin as browsers send it."""
    origin = text.strip().lower()
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{text!r} is no origin such as https://chat.example.org or http://localhost:3000.")
    return origin
