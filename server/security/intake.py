"""Before a request is worked on: does its client ask too much, and are there too many bodies in memory?"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.anthropic.errors import is_anthropic
from chairlift.server.errors import APIError, Respond
from chairlift.server.observe.record import CURRENT, RequestRecord
from chairlift.server.security.gate import key_of
from chairlift.server.security.rates import Admitted, Allowance, Rates, Refused

FREE = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))
"""Methods of requests that cost next to nothing, and are not counted."""
CANCEL = re.compile(r"/v1/responses/[^/]+/cancel")
"""Paths of requests that make room, and are not counted either: who has no room left must be able to."""
SHARE = 0.75
"""Of the memory for bodies that one key's may take, so that others' find room however slow these are."""
Headers = list[tuple[bytes, bytes]]


class Intake:
    """
    Args:
        rates: None: clients may ask as much as they like.
        most_bytes: of the bodies of all requests that are being read or prepared, together.
        respond: writes a refusal.
    """

    def __init__(self, app: ASGIApp, rates: Rates | None, most_bytes: int, respond: Respond) -> None:
        self.app = app
        self._rates = rates
        self._most_bytes = most_bytes
        self._bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in FREE or CANCEL.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
            return
        client = None if self._rates is None else _client(scope)
        if self._rates is None or client is None:
            await self._bounded(scope, receive, send)
            return
        decision = self._rates.admit(client)
        headers = _headers(decision, scope)
        if isinstance(decision, Refused):
            error = _refusal(decision)
            error.headers = {**(error.headers or {}), **_text(headers)}
            await self._respond(error, scope)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._bounded(scope, receive, with_headers)
        finally:
            _when_done(CURRENT.get(), lambda tokens: self._release(client, tokens))

    def _release(self, client: str, tokens: int) -> None:
        assert self._rates is not None
        self._rates.release(client, tokens)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The body counts until the answer begins: then it has been read, and what was made of it is the
        engine's."""
        held = 0
        key = key_of(scope)
        tenant = None if key is None or key.admin else key.tenant

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if size and not self._is_room(size, tenant):
                raise _full()
            held += size
            self._hold(size, tenant)
            return message

        async def watched(message: Message) -> None:
            nonlocal held
            if held:
                self._hold(-held, tenant)
                held = 0
            await send(message)

        try:
            await self.app(scope, counted, watched)
        finally:
            self._hold(-held, tenant)

    def _is_room(self, size: int, tenant: str | None) -> bool:
        if tenant is not None and self._bytes_of[tenant] + size > SHARE * self._most_bytes:
            return False
        return self._bytes + size <= self._most_bytes

    def _hold(self, size: int, tenant: str | None) -> None:
        self._bytes += size
        if tenant is not None:
            self._bytes_of[tenant] += size


def _when_done(record: RequestRecord | None, release: Callable[[int], None]) -> None:
    """Answers in the background outlive their request."""
    if record is None:
        release(0)
        return

    def done(record: RequestRecord) -> None:
        outcome = record.outcome
        release(0 if outcome is None else outcome.prompt_tokens + outcome.output_tokens)

    record.when_done(done)


def _client(scope: Scope) -> str | None:
    """Who is counted together; None: whoever administers the server is not."""
    key = key_of(scope)
    if key is not None:
        return None if key.admin else key.tenant
    address = scope.get("client")
    return "address " + (_network(str(address[0])) if address else "")


def _network(address: str) -> str:
    """Of version 6 a whole network of 64 bits, which is what one place has."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv4Address):
        return address
    if number.ipv4_mapped is not None:  # as a proxy may tell it that listens for both
        return str(number.ipv4_mapped)
    return str(ipaddress.ip_network((int(number) >> 64 << 64, 64)))


def _full() -> APIError:
    return APIError(
        429,
        "Too many large requests are being read; try again soon.",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _refusal(refused: Refused) -> APIError:
    limit = refused.limit
    what = {
        "requests": f"At most {limit} requests a minute are answered",
        "tokens": f"At most {limit} tokens a minute are computed",
        "concurrent": f"At most {limit} requests are answered at once",
    }[refused.what]
    return APIError(
        429,
        f"{what} for each client; try again later.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(refused.retry_s)))},
    )


def _headers(decision: Admitted | Refused, scope: Scope) -> Headers:
    """As the surface's own service names them."""
    write = _anthropic if is_anthropic(scope) else _openai
    headers: Headers = []
    for what, allowance in (("requests", decision.requests), ("tokens", decision.tokens)):
        if allowance is not None:
            headers += write(what, allowance)
    return headers


def _openai(what: str, allowance: Allowance) -> Headers:
    return [
        (f"x-ratelimit-limit-{what}".encode(), str(allowance.limit).encode()),
        (f"x-ratelimit-remaining-{what}".encode(), str(allowance.remaining).encode()),
        (f"x-ratelimit-reset-{what}".encode(), f"{allowance.reset_s:.3f}s".encode()),
    ]


def _anthropic(what: str, allowance: Allowance) -> Headers:
    at = datetime.now(UTC) + timedelta(seconds=allowance.reset_s)
    return [
        (f"anthropic-ratelimit-{what}-limit".encode(), str(allowance.limit).encode()),
        (f"anthropic-ratelimit-{what}-remaining".encode(), str(allowance.remaining).encode()),
        (f"anthropic-ratelimit-{what}-reset".encode(), at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()),
    ]


def _text(headers: Headers) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}
