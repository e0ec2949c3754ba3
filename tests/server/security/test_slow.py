"""Clients that are slow on purpose, by a clock that stands still until it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from chairlift.server.body import LEAST_RATE, read_body
from chairlift.server.connection import Connection
from chairlift.server.errors import APIError
from chairlift.server.security.settings import ConnectionLimits

LIMITS = ConnectionLimits(head_s=30, head_bytes=1000, headers=10, stall_s=60)
HEAD = b"GET / HTTP/1.1\r\nHost: t\r\n"


@dataclass
class Timer:
    at: float
    call: Callable[..., object]
    arguments: tuple[object, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Clock:
    """What a connection asks of an event loop."""

    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., object], *arguments: object) -> Timer:
        self.timers.append(Timer(self.now + seconds, call, arguments))
        return self.timers[-1]

    def create_task(self, coroutine: Any) -> asyncio.Task[None]:
        return asyncio.ensure_future(coroutine)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= end and not timer.cancelled]:
            timer = min(due, key=lambda each: each.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.call(*timer.arguments)
        self.now = end


@dataclass
class Transport:
    """To a client that reads only when it is told to."""

    connection: Connection | None = None
    waiting: bytes = b""
    sent: bytes = b""
    closing: bool = False
    ended: bool = False

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.waiting += data
        assert self.connection is not None
        if len(self.waiting) > 65536:
            self.connection.pause_writing()

    def read(self, count: int | None = None) -> None:
        """By the client."""
        self.sent, self.waiting = self.sent + self.waiting[:count], self.waiting[len(self.waiting[:count]) :]
        assert self.connection is not None
        if len(self.waiting) <= 16384:
            self.connection.resume_writing()
        if self.closing and not self.waiting:
            self._end()

    def close(self) -> None:
        self.closing = True
        if not self.waiting:
            self._end()

    def abort(self) -> None:
        self.closing = True
        self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            assert self.connection is not None
            self.connection.connection_lost(None)

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Conversation:
    def __init__(self, answer: bytes = b"", parts: int = 1) -> None:
        self.sends = 0
        self.gone = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-length", str(len(answer) * parts).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for part in range(1, parts + 1):
                await send({"type": "http.response.body", "body": answer, "more_body": part < parts})
                self.sends += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()

        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=5, ws="none")
        self.clock = Clock()
        self.transport = Transport()
        self.connection = Connection(
            limits=LIMITS, config=config, server_state=ServerState(), app_state={}, _loop=self.clock
        )
        self.transport.connection = self.connection
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    async def say(self, data: bytes) -> None:
        self.connection.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_a_head_has_its_time_however_it_drips() -> None:
    it = Conversation()
    for letter in (HEAD + b"A: long one")[:29]:
        await it.say(bytes([letter]))
        it.clock.advance(1)
    assert not it.transport.ended
    it.clock.advance(0.9)
    assert not it.transport.ended
    it.clock.advance(0.2)
    assert it.transport.ended


async def test_a_connection_that_says_nothing_is_closed() -> None:
    it = Conversation()
    it.clock.advance(29)
    assert not it.transport.ended
    it.clock.advance(2)
    assert it.transport.ended and it.clock.now == 31


async def test_an_idle_connection_is_kept_for_a_while() -> None:
    it = Conversation(b"hello")
    await it.say(HEAD + b"\r\n")
    it.transport.read()
    assert it.transport.sent.endswith(b"hello")
    it.clock.advance(4)
    await it.say(HEAD + b"\r\n")
    it.transport.read()
    assert it.transport.sent.count(b"hello") == 2
    it.clock.advance(4.9)
    assert not it.transport.ended
    it.clock.advance(0.2)
    assert it.transport.ended


async def test_a_client_that_does_not_read_is_cut() -> None:
    """And what makes the answer hears of it, and has not made it all."""
    it = Conversation(b"x" * 50_000, parts=100)
    await it.say(HEAD + b"\r\n")
    assert it.sends == 2
    it.clock.advance(59)
    assert not it.transport.ended and it.sends == 2
    it.clock.advance(2)
    assert it.transport.ended
    async with asyncio.timeout(10):
        await it.gone.wait()
    assert len(it.transport.waiting) < 200_000


async def test_a_client_that_reads_slowly_is_served() -> None:
    it = Conversation(b"x" * 50_000, parts=10)
    await it.say(HEAD + b"\r\n")
    async with asyncio.timeout(10):
        while it.sends < 10:
            it.clock.advance(50)
            assert not it.transport.ended
            it.transport.read()
            await it.settle()
    it.transport.read()
    assert it.transport.sent.endswith(b"x" * 500_000) and it.clock.now >= 200


async def test_what_was_said_last_is_not_waited_for_without_end() -> None:
    """Too little for the buffer to be full, and the connection is to be closed."""
    for request in (HEAD + b"Connection: close\r\n\r\n", HEAD + b"\r\n"):
        it = Conversation(b"hello")
        await it.say(request)
        it.clock.advance(5)
        assert it.transport.closing and not it.transport.ended
        it.clock.advance(60)
        assert it.transport.ended and it.transport.sent == b""


async def test_nothing_of_a_closed_connection_is_left() -> None:
    it = Conversation(b"hello")
    await it.say(HEAD + b"Connection: close\r\n\r\n")
    it.transport.read()
    assert it.transport.ended
    assert [timer for timer in it.clock.timers if not timer.cancelled] == []


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"X: " + b"a" * 1000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nHost: t\r\n\r\n",
        HEAD + b"".join(b"A%d: 1\r\n" % number for number in range(10)) + b"\r\n",
        HEAD + b"X: " + b"a" * 1000,
    ],
    ids=["long", "target", "many", "endless"],
)
async def test_a_head_that_is_too_large_is_431(head: bytes) -> None:
    it = Conversation(b"hello")
    await it.say(head)
    it.transport.read()
    assert it.transport.sent.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b'"code":"request_headers_too_large"' in it.transport.sent
    assert it.transport.ended and it.sends == 0


async def test_a_head_as_large_as_it_may_be_is_read() -> None:
    it = Conversation(b"hello")
    many = b"".join(b"A%d: 1\r\n" % number for number in range(8))
    await it.say(HEAD + many + b"X: " + b"a" * 850 + b"\r\n\r\n")
    it.transport.read()
    assert it.transport.sent.startswith(b"HTTP/1.1 200 ")


class Skipping(asyncio.SelectorEventLoop):
    """A loop on which nothing takes time but what says so: where it would wait, its clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            self.skipped += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.skipped


def upload(chunks: list[tuple[float, int]], patience_s: float = 30) -> tuple[int, float]:
    """Bytes read, and seconds taken. Args: chunks: seconds before each, and its bytes."""

    async def read() -> int:
        waiting = iter(chunks)

        async def receive() -> Message:
            seconds, size = next(waiting, (0.0, 0))
            await asyncio.sleep(seconds)
            return {"type": "http.request", "body": b"x" * size, "more_body": size > 0}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        return len(await read_body(request, 10**9, patience_s))

    loop = Skipping()
    try:
        return loop.run_until_complete(read()), loop.skipped
    finally:
        loop.close()


def test_a_body_may_pause_and_may_be_slow() -> None:
    assert upload([(20, 5), (9, 100_000), (29, 5)])[0] == 100_010
    assert upload([(1, LEAST_RATE)] * 300)[0] == 300 * LEAST_RATE


def test_a_body_that_pauses_too_long_is_408() -> None:
    with pytest.raises(APIError) as refused:
        upload([(1, 10**6), (31, 5)])
    assert refused.value.status == 408


def test_a_body_that_drips_is_408() -> None:
    """A byte a second would never be too late for one that waits for the next."""
    with pytest.raises(APIError) as refused:
        upload([(1, 1)] * 1000)
    assert refused.value.status == 408
