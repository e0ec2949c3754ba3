"""Clients that stop in the middle of what they say."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from chairlift.server.connection import CHUNKS, DEFAULT_LIMITS, LEAST_CHUNK, Connection
from chairlift.server.security.settings import ConnectionLimits
from chairlift.server.serve import listen
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.harness import Lift, chat_body, lift, on_socket
from tests.server.observe.reading import LOGGING, request_lines
from tests.server.test_serve import BODY, serving

HALF_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n"
HALF_BODY = HALF_HEAD + b'Content-Length: 100\r\n\r\n{"model"'
ENOUGH_TOKENS = 6000
"""In chunks of more than a kilobyte, more than the buffers on the way to a client hold."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


IMPATIENT = ConnectionLimits(head_s=0.05)


@asynccontextmanager
async def connected(
    limits: ConnectionLimits = DEFAULT_LIMITS, settings: ServerSettings | None = None
) -> AsyncIterator[tuple[Lift, Streams]]:
    runner = FakeRunner(answering("bonjour"))
    async with lift(runner, settings=settings) as server, on_socket(server.app, limits) as url:
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            yield server, (reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    """Status and body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def whole_request() -> bytes:
    body = json.dumps(chat_body()).encode()
    return HALF_HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("sent", [b"", b"GET", HALF_HEAD], ids=["nothing", "a word", "half"])
async def test_a_head_that_does_not_end_closes_the_connection(sent: bytes) -> None:
    async with connected(IMPATIENT) as (_, (reader, writer)):
        writer.write(sent)
        async with asyncio.timeout(10):
            assert await reader.read() == b""


async def test_also_on_a_connection_that_has_served_before() -> None:
    async with connected(IMPATIENT) as (_, (reader, writer)):
        writer.write(whole_request())
        assert (await answer(reader))[0] == 200
        writer.write(HALF_HEAD)
        async with asyncio.timeout(4):  # upstream's own limit, 5 s, is for connections that say nothing
            assert await reader.read() == b""


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with connected(IMPATIENT) as (server, (reader, writer)):
        server.runner.close_gate()
        writer.write(whole_request())
        await server.runner.at_gate()
        await asyncio.sleep(3 * IMPATIENT.head_s)
        server.runner.open_gate()
        status, body = await answer(reader)
        assert (status, body["object"]) == (200, "chat.completion")


async def test_a_body_that_does_not_go_on_is_408() -> None:
    async with connected(settings=ServerSettings(body_patience_s=0.05)) as (_, (reader, writer)):
        writer.write(HALF_BODY)
        async with asyncio.timeout(10):
            status, body = await answer(reader)
            assert await reader.read() == b""
    assert status == 408
    error = body["error"]
    assert isinstance(error, dict) and error["code"] == "request_timeout"


async def test_a_body_that_goes_on_slowly_is_read() -> None:
    async with connected(settings=ServerSettings(body_patience_s=5)) as (_, (reader, writer)):
        request = whole_request()
        for at in range(0, len(request), 7):
            writer.write(request[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        HALF_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["a line", "a header", "a chunk"],
)
async def test_what_is_no_http_is_refused_in_the_envelope(sent: bytes) -> None:
    async with connected() as (server, (reader, writer)):
        writer.write(sent)
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        await server.until_idle()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert re.search(rb"(?mi)^x-request-id: req_[0-9a-f]{32}\r?$", head)
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")


def chunked(size: int) -> bytes:
    """A chat's body in chunks of so many bytes, behind spaces that make more than `CHUNKS` of them."""
    body = b" " * (CHUNKS * size + size) + json.dumps(chat_body()).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return HALF_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def test_a_body_in_very_many_very_small_chunks_is_refused() -> None:
    """Each takes the event loop as long as a large one: one client's would keep all others waiting."""
    async with connected() as (_, (reader, writer)):
        writer.write(chunked(2 * LEAST_CHUNK))
        assert (await answer(reader))[0] == 200
        writer.write(chunked(1))
        status, body = await answer(reader)
        assert status == 400 and "small chunks" in str(body["error"])
        assert await reader.read() == b""


async def test_chunks_are_counted_anew_for_each_request() -> None:
    async with connected() as (_, (reader, writer)):
        for _ in range(3):
            body = json.dumps(chat_body()).encode()
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in (b" " * (CHUNKS - len(body)) + body))
            writer.write(HALF_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("given", ["", "X-Request-Id: mine\r\n"], ids=["", "its own id"])
async def test_a_request_that_goes_wrong_is_refused_as_its_surface_does_by_its_own_id(given: str) -> None:
    head = f"POST /v1/messages HTTP/1.1\r\nHost: t\r\n{given}Transfer-Encoding: chunked\r\n\r\n"
    async with connected(settings=LOGGING) as (server, (reader, writer)):
        with request_lines() as seen:
            writer.write(head.encode())
            async with asyncio.timeout(10):
                while await server.metric("http_requests_in_progress") < 2:  # this, and the scrape
                    await asyncio.sleep(0)
                writer.write(b"zz\r\n")
                headers, _, body = (await reader.read()).decode().partition("\r\n\r\n")
                while len(seen.lines) < 2:
                    await asyncio.sleep(0)
    assert headers.startswith("HTTP/1.1 400 ")
    told = json.loads(body)
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert f"request-id: {told['request_id']}" in headers.split("\r\n")
    shown = "mine" if given else told["request_id"]
    assert f"x-request-id: {shown}" in headers.split("\r\n")
    assert [(line["request_id"], line["status"]) for line in seen.lines] == [(shown, 400), (shown, 499)]


async def test_what_is_no_http_behind_a_request_that_is_being_answered_ends_the_connection() -> None:
    async with connected() as (server, (reader, writer)):
        server.runner.close_gate()
        writer.write(whole_request())
        await server.runner.at_gate()
        writer.write(b"GARBAGE\r\n\r\n")
        server.runner.open_gate()
        async with asyncio.timeout(10):
            assert (await answer(reader))[0] == 200
            assert (await answer(reader))[0] == 400
            assert await reader.read() == b""


async def test_a_request_to_upgrade_is_answered_without_one(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    async with lift() as server, on_socket(server.app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert caplog.text == ""


async def test_what_is_small_is_sent_at_once() -> None:
    """Also where the listening socket is that of `run_server`."""
    accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    class Seen(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            accepted.set_result(transport.get_extra_info("socket"))

    config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    loop = asyncio.get_running_loop()
    with listen("127.0.0.1", 0) as listener:
        make = partial(Seen, config, ServerState(), {})
        async with await loop.create_server(make, sock=listener) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            its = await asyncio.wait_for(accepted, 10)
            assert its.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            await writer.wait_closed()


async def test_a_client_that_is_gone_before_its_connection_begins_is_no_fault() -> None:
    """macOS refuses options of such a socket."""

    class Gone:
        def get_extra_info(self, name: str) -> Gone | None:
            return self if name == "socket" else None

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", 1

        def getpeername(self) -> tuple[str, int]:
            raise OSError(errno.EINVAL, "Invalid argument")

        def setsockopt(self, *option: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    state = ServerState()
    connection = Connection(config, state, {})
    connection.connection_made(Gone())  # type: ignore[arg-type]
    assert state.connections == {connection}
    connection.connection_lost(ConnectionResetError())


def test_half_a_request_does_not_hold_up_the_exit() -> None:
    """It has nobody to answer: no wait, and no trace of it on stderr."""
    with serving(3600, "short") as process:
        port = httpx.URL(process.url).port
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(HALF_BODY)
            with socket.create_connection(("127.0.0.1", port)) as other:
                other.sendall(HALF_HEAD)
                assert httpx.get(f"{process.url}/health").status_code == 200
                process.signal(signal.SIGTERM)
                assert process.end() == (0, "")
                assert client.recv(1) == other.recv(1) == b""


def test_a_client_that_does_not_read_holds_up_the_exit_no_longer_than_the_flush() -> None:
    """And leaves no trace on stderr."""
    wanted = {"stream": True, "max_tokens": 10**6, "logprobs": True, "top_logprobs": 20}
    body = json.dumps({**BODY, **wanted}).encode()
    with serving(0.1, "endless") as process, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", httpx.URL(process.url).port))
        client.sendall(HALF_HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while generated(httpx.get(f"{process.url}/metrics").text) < ENOUGH_TOKENS:
            pass
        process.signal(signal.SIGTERM)
        assert process.end() == (0, "")


def generated(metrics: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith("chairlift_generation_tokens_total"))
    return float(line.rpartition(" ")[2])
