"""What the operator asks of a server's defences."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.server.security.keys import KeySources
from chairlift.server.security.rates import RateSettings
from chairlift.server.security.tls import TLSSettings


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_s: float = 30.0
    """Seconds in which a request's head must be whole."""
    head_bytes: int = 32 * 1024
    """Of a request's head: its first line and all headers."""
    headers: int = 128
    stall_s: float = 60.0
    """Seconds in which a client must read on: what waits for it, when it is more than is worth sending (64
    KiB), or when all has been said and the connection is to be closed."""
    idle_s: int = 20
    """Seconds that a connection is kept without a request. Longer than clients keep theirs (httpx, and so the
    SDKs, 5, aiohttp 15): a request that is on its way when the server closes is lost."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed; `*`:
    everybody's."""


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    keys: KeySources = field(default_factory=KeySources)
    rates: RateSettings = field(default_factory=RateSettings)
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    prefix_cache_per_key: bool = False
    """Prefixes serve only the client that brought them."""
    tls: TLSSettings | None = None
    insecure: bool = False
    """Listen where others can connect, without keys."""
    metrics_public: bool = False
    """`/metrics` needs no key."""
    cors_origins: tuple[str, ...] = ()
    """Whose pages may read answers, such as `https://chat.example.org`; `*`: everybody's."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names, or `*.example.org`, that requests may be for, besides this machine's and numeric addresses;
    None: any."""
