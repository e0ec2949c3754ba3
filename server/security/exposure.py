"""Whether an address can be reached from elsewhere, and whether the server may listen there."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def is_loopback(address: str) -> bool:
    """`address`: a numeric one, as sockets have it. What is no address counts as reachable."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback


def refusal(host: str, addresses: Sequence[str], *, protected: bool, insecure: bool) -> str | None:
    """Why the server must not listen on `host`; None: it may.

    Args:
        addresses: what `host` resolves to, numeric.
        protected: requests need an API key.
        insecure: the operator has said that everybody may ask.
    """
    if protected or insecure or (addresses and all(map(is_loopback, addresses))):
        return None
    return (
        f"Whoever reaches {host or 'this machine'} could use this server. Set a key (--api-key-file, "
        "--api-key or CHAIRLIFT_API_KEY), listen on 127.0.0.1, or say --insecure if that is meant."
    )
