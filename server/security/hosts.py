"""Which names and which web pages a server answers to.

A browser lets any page send requests to any address, also to one that only this machine can reach. Two things
stop a page that its user merely visits: the name in `Host`, where the page's own name has been made to lead
here (DNS rebinding), and `Origin`, which the browser sets and the page cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.errors import APIError, Respond, shorten
from chairlift.server.security.exposure import is_loopback
from chairlift.server.security.keys import Keys
from chairlift.server.security.names import host_name, is_allowed


class HostGuard:
    """Refuses requests for a name that is not ours."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str], respond: Respond) -> None:
        self.app = app
        self._allowed = tuple(allowed)
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _header(scope, b"host")
            # Without one it is no browser: HTTP/1.1 needs it.
            if host is not None and not self._answers_to(host):
                error = _refused_host(host)
                await self._respond(error, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _answers_to(self, host: str) -> bool:
        name = host_name(host)
        return name is not None and is_allowed(name, self._allowed)


class OriginGuard:
    """Where no key is asked for, refuses what pages of other origins send: a browser sends some requests
    without asking first, and they would compute here though the page cannot read the answer. With keys there
    is no need, since a page does not know one."""

    def __init__(self, app: ASGIApp, keys: Keys, origins: Sequence[str], respond: Respond) -> None:
        self.app = app
        self._keys = keys
        self._origins = frozenset(origins)
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys:
            origin = _header(scope, b"origin")
            if origin is not None and not self._trusts(origin.lower(), _header(scope, b"host")):
                await self._respond(_refused_origin(origin), scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _trusts(self, origin: str, host: str | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        if not origin.startswith(("http://", "https://")):
            return False  # `null`, extensions, files
        place = origin.partition("://")[2]
        return place == (host or "").lower() or _is_here(place)


def _is_here(place: str) -> bool:
    """A page of this machine, as far as the browser can know."""
    name = host_name(place)
    if name is None:
        return False
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _refused_host(host: str) -> APIError:
    return APIError(
        403,
        f"This server does not answer to the name {shorten(host)!r}; its operator can allow it "
        "(--allowed-host).",
        code="host_not_allowed",
    )


def _refused_origin(origin: str) -> APIError:
    return APIError(
        403,
        f"Pages of {shorten(origin)!r} may not use this server; its operator can allow them (--cors-origin).",
        code="origin_not_allowed",
    )
