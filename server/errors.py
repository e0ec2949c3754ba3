"""Every refusal in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`.

Source of the form: the error codes of OpenAI's API reference, and what its service answers.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.engine.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineStopped,
    InvalidParameter,
    ModelUnavailable,
    QueueFull,
)
from chairlift.server.payload import PayloadResponse

logger = logging.getLogger("chairlift.server")

CLIENT_CLOSED_REQUEST = 499
"""Nobody receives it; it is nginx's code for the log when a client left before the answer."""
INVALID_REQUEST = "invalid_request_error"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class APIError(Exception):
    """A refusal as the client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def envelope(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, request_id: str) -> Response:
        return PayloadResponse(
            self.envelope(), self.status, {**(self.headers or {}), "X-Request-Id": request_id}
        )


def request_id_of(scope: Scope, prefix: str = "req_") -> str:
    """Made at the first call, the same for the whole of a request."""
    state: dict[str, object] = scope.setdefault("state", {})
    return str(state.setdefault("request_id", prefix + uuid.uuid4().hex))


def shorten(text: str, most: int = 120) -> str:
    """A client's own words, as they may stand in a message back to it."""
    return text if len(text) <= most else text[: most - 1] + "…"


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def unsupported(param: str, message: str | None = None) -> APIError:
    return invalid(message or f"{param} is not supported.", param, "unsupported_parameter")


def model_not_found(name: str) -> APIError:
    return APIError(
        404, f"The model {shorten(name)!r} does not exist.", param="model", code="model_not_found"
    )


def internal_error() -> APIError:
    return APIError(
        500, "The server had an error while answering.", kind="server_error", code="internal_error"
    )


AGAIN_SECONDS = "5"
"""After which a server that loads, or that ends and is started again, may be asked again."""


def from_engine(error: EngineError) -> APIError:
    """The engine's refusal or failure in HTTP's words. Engine messages are fit for the client as they are."""
    if isinstance(error, ContextLengthExceeded):
        return invalid(error.message, error.param, "context_length_exceeded")
    if isinstance(error, InvalidParameter):
        return invalid(error.message, error.param, "invalid_value")
    if isinstance(error, QueueFull):
        # Retry-After is in whole seconds (RFC 9110, 10.2.3); 0 would invite the client straight back.
        seconds = max(1, math.ceil(error.retry_after))
        return APIError(
            429,
            error.message,
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )
    if isinstance(error, EngineStopped | ModelUnavailable):
        return APIError(
            503,
            error.message,
            kind="server_error",
            code="unavailable",
            headers={"Retry-After": AGAIN_SECONDS},
        )
    return APIError(500, error.message, kind="server_error", code="engine_error")


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> tuple[str, ...]:
    """Methods that some route has for this path, in a fixed order; empty for an unknown path."""
    routes = tuple(routes)
    return tuple(
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    )


Respond = Callable[[APIError, Scope], Response]
"""A refusal in the form of the surface that was asked."""


def _unmatched(request: Request, error: HTTPException) -> APIError:
    """404, 405 and others of the framework's own."""
    if error.status_code == 405:
        allow = _allow(request)
        return APIError(
            405,
            f"Not allowed: {request.method} on {shorten(request.scope['path'])} (allowed: {allow}).",
            code="method_not_allowed",
            headers={"Allow": allow},
        )
    if error.status_code == 404:
        return APIError(
            404,
            f"Unknown request URL: {request.method} {shorten(request.scope['path'])}.",
            code="unknown_url",
        )
    return APIError(error.status_code, str(error.detail), headers=dict(error.headers or {}))


def _allow(request: Request) -> str:
    return ", ".join((*allowed_methods(request.app.router.routes, request.scope), "OPTIONS"))


def _handlers(respond: Respond) -> dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and request.method == "OPTIONS":  # which no route answers
            return Response(status_code=204, headers={"Allow": _allow(request)})
        return respond(_unmatched(request, error), request.scope)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return respond(error, request.scope)

    async def on_engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return respond(from_engine(error), request.scope)

    return {HTTPException: on_http_exception, APIError: on_api_error, EngineError: on_engine_error}


class ErrorBoundary:
    """Outermost: an exception nobody foresaw is logged here and answered without its text, which may hold a
    path or a part of somebody's prompt. Once the answer has begun it can only be broken off."""

    def __init__(self, app: ASGIApp, respond: Respond) -> None:
        self.app = app
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if started:
                raise
            path = scope["path"].encode("unicode_escape").decode("ascii")  # it may hold anything
            logger.exception("%s %s failed (%s)", scope["method"], path, request_id_of(scope))
            await self._respond(internal_error(), scope)(scope, receive, send)


def install(app: FastAPI, respond: Respond) -> None:
    for kind, handler in _handlers(respond).items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(ErrorBoundary, respond=respond)
