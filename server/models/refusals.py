"""What requests and operators are told when they cannot have what they want of a model."""

from __future__ import annotations

import math

from chairlift.server.errors import APIError


def still_loading(name: str) -> APIError:
    return _unavailable(
        f"The model {name!r} is still being loaded; try again soon.", 5.0, code="model_loading"
    )


def failed(name: str, reason: str, again_s: float) -> APIError:
    """`again_s`: seconds until it is tried again."""
    return _unavailable(
        f"The model {name!r} could not be loaded: {reason.rstrip('.')}.", again_s, code="model_failed"
    )


def pinned(name: str) -> APIError:
    return _conflict(f"The model {name!r} is pinned.", code="model_pinned")


def busy(name: str, state: str) -> APIError:
    return _conflict(f"The model {name!r} is {state} just now.", code="model_busy")


def in_use(name: str) -> APIError:
    return _conflict(
        f"The model {name!r} still answers requests; with force it is unloaded all the same.",
        code="model_in_use",
    )


def _unavailable(message: str, again_s: float, *, code: str) -> APIError:
    # Whole seconds (RFC 9110, 10.2.3); 0 would invite the client straight back.
    headers = {"Retry-After": str(max(1, math.ceil(again_s)))} if math.isfinite(again_s) else None
    return APIError(503, message, kind="server_error", code=code, headers=headers)


def _conflict(message: str, *, code: str) -> APIError:
    return APIError(409, message, param="model", code=code)
