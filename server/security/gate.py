"""Nothing but health is answered without a key, where there are keys: routes that do not exist included."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.errors import APIError, Respond
from chairlift.server.security.keys import Key, Keys

HEALTH = ("/health", "/health/ready")
METRICS = "/metrics"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="chairlift"'}

Headers = Iterable[tuple[bytes, bytes]]


class Gate:
    """Before every route. Whose key a request brings is in `state["key"]` from here on."""

    def __init__(self, app: ASGIApp, keys: Keys, respond: Respond, *, metrics_public: bool) -> None:
        self.app = app
        self._keys = keys
        self._respond = respond
        self._open = frozenset((*HEALTH, METRICS) if metrics_public else HEALTH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (not self._keys and scope["type"] == "http"):
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] in self._open:
            await self.app(scope, receive, send)
        else:
            presented = credentials(scope["headers"])
            key = next((key for secret in presented if (key := self._keys.find(secret)) is not None), None)
            if key is None:
                await self._respond(_refused(bool(presented)), scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
            await self.app(scope, receive, send)


def key_of(scope: Scope) -> Key | None:
    """Whose key the request has brought; None where there are no keys."""
    key = scope.get("state", {}).get("key")
    assert key is None or isinstance(key, Key)
    return key


def credentials(headers: Headers) -> list[bytes]:
    """The key of `Authorization: Bearer` (RFC 6750) and that of `x-api-key`: clients that have two settings
    for one thing send both, and one of them right is enough. Of a header given several times the first
    counts."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"x-api-key":
            found.setdefault(name, value.strip())
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.setdefault(name, token.strip())
    return [secret for secret in found.values() if secret]


def _refused(presented: bool) -> APIError:
    message = (
        "This API key is not known here."
        if presented
        else "An API key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
    )
    return APIError(401, message, code="invalid_api_key", headers=dict(CHALLENGE))
