"""Which addresses an image may be fetched from on a client's word.

A server that fetches whatever URL it is sent can be made to read what only it can reach: its own ports, the
network it stands in, the metadata service of its cloud (server-side request forgery). So only public
addresses.
"""

from __future__ import annotations

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Well-known prefix by which a network without IPv4 reaches IPv4 (RFC 6052); the last 32 bits are the
address."""
_REFUSED = tuple(  # beside what the standard library knows, which differs by its version
    ipaddress.ip_network(network)
    for network in (
        "100.64.0.0/10",  # carrier-grade NAT (RFC 6598), and Alibaba's metadata at 100.100.100.200
        "168.63.129.16/32",  # Azure's host: metadata and DNS, within a public range
        "192.0.0.0/24",  # protocol assignments (RFC 6890), and Oracle's metadata
        "192.88.99.0/24",  # 6to4 relays (RFC 7526), given up
        "64:ff9b:1::/48",  # NAT64 within a network (RFC 8215)
        "2001::/23",  # protocol assignments (RFC 2928), and Teredo tunnels to an IPv4 address
        "2002::/16",  # 6to4 tunnels to an IPv4 address
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing within a network (RFC 9602)
        "fec0::/10",  # site-local (RFC 3879), given up
    )
)


def is_public(address: str) -> bool:
    """Whether `address`, an IPv4 or IPv6 literal, is one of the open internet.

    IPv4 inside IPv6 (mapped, NAT64) is judged as the IPv4 address that is reached. What is no address is not
    public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif parsed in _NAT64:
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    if any(parsed.version == network.version and parsed in network for network in _REFUSED):
        return False
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)
