"""What is settled of every request before it finds its route: its framing and the spelling of its URL.

What decides by path stands behind this, so that no spelling leads around it.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.errors import APIError, Respond

_AUTHORITY = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class Entrance:
    """Refuses what two servers in a row might read as two different requests; reads a request's target.

    Args:
        respond: writes a refusal.
    """

    def __init__(self, app: ASGIApp, respond: Respond) -> None:
        self.app = app
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        _spell(scope)
        names = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" in names and b"content-length" in names:
            error = APIError(
                400,
                "The request has both Content-Length and Transfer-Encoding.",
                code="invalid_http",
                headers={"Connection": "close"},
            )
            await self._respond(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _spell(scope: Scope) -> None:
    """The path alone where the target was a whole URL, as proxies are asked (RFC 9112, 3.2.2), whose host is
    the one that counts; and no slash at its end, which no endpoint here has (`raw_path` keeps it)."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    found = _AUTHORITY.match(raw)
    if found is not None:
        raw = raw[found.end() :] or b"/"
        others = [header for header in scope["headers"] if header[0] != b"host"]
        scope["headers"] = [*others, (b"host", found[1])]
    elif len(raw) < 2 or not raw.endswith(b"/"):
        return
    scope["raw_path"] = raw
    scope["path"] = unquote((raw.removesuffix(b"/") or b"/").decode())
