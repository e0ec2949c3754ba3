"""Refusals in Anthropic's envelope: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

Source: Anthropic's API reference, Errors.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from chairlift.server.errors import APIError, request_id_of
from chairlift.server.payload import PayloadResponse
from chairlift.server.streaming import frame

OVERLOADED = 529
"""Anthropic's status where the field says 503."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Other 4xx are `invalid_request_error`, other 5xx `api_error`."""


def is_anthropic(scope: Scope) -> bool:
    """The request is for Anthropic's surface, or of a client that speaks no other."""
    path: str = scope["path"]
    return (
        path == "/v1/messages"
        or path.startswith("/v1/messages/")
        or any(name == b"anthropic-version" for name, _ in scope["headers"])
    )


def envelope(error: APIError, request_id: str) -> dict[str, object]:
    status = _status(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: dict[str, object] = {"type": kind, "message": error.message}
    if error.param == "thread":
        # At this the SDK's helpers send the whole conversation instead.
        body["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": body, "request_id": request_id}


def error_frame(error: APIError, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    return frame(envelope(error, request_id), "error")


def refusal_of(error: APIError, scope: Scope) -> Response:
    """In the form of the surface that was asked."""
    return error_response(error, scope) if is_anthropic(scope) else error.response(request_id_of(scope))


def error_response(error: APIError, scope: Scope) -> Response:
    request_id = request_id_of(scope)
    headers = {**(error.headers or {}), "request-id": request_id}
    return PayloadResponse(envelope(error, request_id), _status(error), headers)


def _status(error: APIError) -> int:
    return OVERLOADED if error.status == 503 else error.status
