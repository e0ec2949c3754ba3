"""The one place where an answer becomes bytes, so that one change here makes every surface faster."""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson
from starlette.responses import Response

Payload = dict[str, object]
"""A JSON object on its way out."""


def dump(payload: Mapping[str, object]) -> bytes:
    """Compact UTF-8 JSON; NaN and infinities, which JSON has not, become null."""
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError:
        # Numbers beyond 64 bits, such as a client's schema may hold that is sent back.
        return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()


class PayloadResponse(Response):
    media_type = "application/json"

    def __init__(
        self, payload: Mapping[str, object], status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(dump(payload), status_code, headers)
