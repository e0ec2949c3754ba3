"""The defences of an app, in their order. From outside in: names and pages, CORS, the boundary of errors
and the entrance (neither is ours), names, pages, keys."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from chairlift.server.errors import Respond
from chairlift.server.security.gate import Gate
from chairlift.server.security.hosts import HostGuard, OriginGuard
from chairlift.server.security.intake import Intake
from chairlift.server.security.keys import Keys
from chairlift.server.security.rates import Rates
from chairlift.server.security.settings import SecuritySettings

EXPOSED = ("x-request-id", "request-id", "retry-after", "www-authenticate") + tuple(
    name
    for what in ("requests", "tokens")
    for name in (
        *(f"x-ratelimit-{each}-{what}" for each in ("limit", "remaining", "reset")),
        *(f"anthropic-ratelimit-{what}-{each}" for each in ("limit", "remaining", "reset")),
    )
)
"""Headers of answers that a page's script may read, besides the few that it always may."""


BODIES = 8
"""As many of the largest size may be in memory at once."""


def install_guards(
    app: FastAPI, keys: Keys, settings: SecuritySettings, respond: Respond, max_body_bytes: int
) -> None:
    """Call before what has to stand before them: the spelling of the URL, and the boundary of errors."""
    rates = Rates(settings.rates) if settings.rates else None
    app.add_middleware(Intake, rates=rates, most_bytes=BODIES * max_body_bytes, respond=respond)
    app.add_middleware(Gate, keys=keys, respond=respond, metrics_public=settings.metrics_public)
    app.add_middleware(OriginGuard, keys=keys, origins=settings.cors_origins, respond=respond)
    if settings.allowed_hosts is not None:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts, respond=respond)


def install_cors(app: FastAPI, settings: SecuritySettings) -> None:
    """Call after the boundary of errors is installed: pages get to read a 500, too. What a browser asks
    before a request is answered here, and needs no key."""
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
            allow_private_network=True,
        )
