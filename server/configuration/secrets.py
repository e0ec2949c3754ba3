"""What is asked of a server's defences, checked and handed on."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import SecretStr

from chairlift.server.security.keys import KeyFault, KeySources, parse_key
from chairlift.server.security.rates import RateSettings
from chairlift.server.security.settings import ConnectionLimits, SecuritySettings
from chairlift.server.security.tls import TLSSettings

if TYPE_CHECKING:
    from chairlift.server.configuration.fields import Configuration


def checked_keys(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """Raises: ValueError: one is no key."""
    try:
        for key in keys:
            parse_key(key.get_secret_value(), "This")
    except KeyFault as fault:
        raise ValueError(str(fault).removeprefix("This: ")) from None
    return keys


def check_proxy(text: str) -> str:
    """Raises: ValueError: it is no address, network or `*`."""
    if text != "*":
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is no address such as 127.0.0.1 or 10.0.0.0/8.") from None
    return text


def connection_limits(given: Configuration) -> ConnectionLimits:
    return ConnectionLimits(
        head_s=given.header_timeout,
        head_bytes=round(given.header_limit * 1024),
        stall_s=given.send_timeout,
        idle_s=given.keep_alive_timeout,
        proxies=given.forwarded_allow_ips,
    )


def security_settings(given: Configuration) -> SecuritySettings:
    password = given.ssl_keyfile_password
    tls = None
    if given.ssl_certfile is not None:
        tls = TLSSettings(
            given.ssl_certfile, given.ssl_keyfile, None if password is None else password.get_secret_value()
        )
    return SecuritySettings(
        keys=KeySources(
            api_keys=_bare(given.api_key),
            api_key_files=given.api_key_file,
            admin_keys=_bare(given.admin_key),
            admin_key_files=given.admin_key_file,
        ),
        rates=RateSettings(given.requests_per_minute, given.tokens_per_minute, given.concurrent_requests),
        connection=connection_limits(given),
        prefix_cache_per_key=given.prefix_cache_per_key,
        tls=tls,
        insecure=given.insecure,
        metrics_public=given.metrics_public,
        cors_origins=given.cors_origin,
        allowed_hosts=given.allowed_host or None,
    )


def _bare(keys: Iterable[SecretStr]) -> tuple[str, ...]:
    return tuple(key.get_secret_value() for key in keys)
