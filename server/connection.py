"""One client's connection: uvicorn's over h11, where half a request does not hold it for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.errors import invalid
from chairlift.server.payload import dump

HEAD_S = 30.0
"""Seconds in which a request's head must be whole."""


class Connection(H11Protocol):
    """Closed when a request's head does not come to its end: uvicorn 0.54 waits without limit, and each such
    connection is a file descriptor less for others. A body's time is `read_body`'s business."""

    head_s = HEAD_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._stop_waiting()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def cut_half_request(self) -> None:
        """Close if the body of a request has not come to its end: nobody will answer it."""
        if self._answering and self.cycle.more_body:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as everything else is; upstream answers in plain text, and fails where
        an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        error = invalid("The request is not valid HTTP.", code="invalid_http")
        headers = [("Content-Type", "application/json"), ("Connection", "close")]
        body = dump(error.envelope())
        headers.append(("Content-Length", str(len(body))))
        answer: list[h11.Event] = [
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in answer:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Answered as if not asked, as HTTP allows; upstream's advice to install a library is wrong here."""
