"""One client's connection: uvicorn's over h11, where no client holds it for ever by being slow, and a
request's head is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.anthropic.errors import refusal_of
from chairlift.server.errors import APIError, invalid, request_id_of
from chairlift.server.observe.record import given_id
from chairlift.server.security.settings import ConnectionLimits

access = logging.getLogger("chairlift.access")
DEFAULT_LIMITS = ConnectionLimits()


CHUNKS, LEAST_CHUNK = 1000, 64
"""Of a body: as many chunks may be of any size, more must have so many bytes each on the average."""


class SmallChunks(h11.RemoteProtocolError):
    """A chunk of one byte takes as long to be read as one of thousands, and nobody is heard meanwhile."""


class Parser(h11.Connection):
    """h11 0.16 looks at the length of a head only while it is not whole, and not at the number of headers or
    of a body's chunks."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self._chunks = self._chunked = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            if size > self._limits.head_bytes or len(event.headers) > self._limits.headers:
                raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
            self._chunks = self._chunked = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._chunked += len(event.data)
            if self._chunks > CHUNKS and self._chunked < LEAST_CHUNK * self._chunks:
                raise SmallChunks("the body comes in chunks that are too small")
        return event


class Connection(H11Protocol):
    """Closed when a request's head does not come to its end, and when a client does not read: uvicorn 0.54
    waits without limit for both, and each such connection is a file descriptor less for others. A body's time
    is `read_body`'s business."""

    def __init__(self, *args: Any, limits: ConnectionLimits = DEFAULT_LIMITS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Parser(limits)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does it for sockets that know their protocol, as those of `socket.create_server` do not.
        # Otherwise what is small waits until the client has acknowledged what came before, 40 ms mostly.
        if (its := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # macOS: the client is gone already
                its.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stalling()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._stop_waiting()
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()

    # -- clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_stalling()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reading()

    def close(self) -> None:
        """Once the client has read what it is sent, or has had its time to."""
        self.transport.close()
        self._await_reading()

    def cut_half_request(self) -> None:
        """Close if the body of a request has not come to its end: nobody will answer it."""
        if self._answering and self.cycle.more_body:
            self.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_reading(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._limits.stall_s, self.transport.abort)

    def _stop_stalling(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as everything else is; upstream answers in plain text, and fails where
        an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        fault = sys.exception()
        hint = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
        what = (
            "body comes in too many small chunks"
            if isinstance(fault, SmallChunks)
            else "request is not valid HTTP"
        )
        error = self._too_large() if hint == 431 else invalid(f"The {what}.", code="invalid_http")
        # Of a request whose head was right, its own id and form; what is no HTTP is no request.
        scope: Scope = dict(self.scope) if self._answering else {"path": "", "headers": ()}
        refusal = refusal_of(error, scope)
        request_id = given_id(scope) or request_id_of(scope)
        headers = [(name, value) for name, value in refusal.raw_headers if name != b"x-request-id"]
        headers += [(b"connection", b"close"), (b"x-request-id", request_id.encode())]
        reason = b"Bad Request" if error.status == 400 else b"Request Header Fields Too Large"
        answer: list[h11.Event] = [
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=bytes(refusal.body)),
            h11.EndOfMessage(),
        ]
        for event in answer:
            self.transport.write(self.conn.send(event) or b"")
        client = self.client[0] if self.client else None
        told = {"request_id": request_id, "status": error.status, "error": error.code, "client": client}
        access.info("no request %d", error.status, extra=told)
        self.close()

    def _too_large(self) -> APIError:
        limits = self._limits
        return APIError(
            431,
            f"The request's head has more than {limits.head_bytes} bytes or {limits.headers} headers.",
            code="request_headers_too_large",
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Answered as if not asked, as HTTP allows; upstream's advice to install a library is wrong here."""
