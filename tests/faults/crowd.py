"""Thousands of idle connections, and hundreds of clients that do not read: do others notice?

    python -m tests.faults.crowd --idle 2000 --slow 500

The server begins with a limit of 256 open files, as under launchd, and raises it itself. Idle are those that
say nothing, those that stop within a request's head, and those that were answered and stay. Who does not read
asks for an endless stream with many log probabilities, and has buffers as small as the system allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from tests.faults.exchange import ask, exchange, letters_after, reply_of, request_bytes
from tests.faults.fake_server import MODEL, Options, fake_serving
from tests.served.process import Served

COMPLETIONS = "/v1/completions"
FEW_FILES = ("sh", "-c", 'ulimit -Sn 256 && exec "$@"', "sh")
"""Before a command."""
HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Unfinish"
WHOLE = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
AT_ONCE = 200
"""Connections that are opened together."""
BUFFER = 4096
"""Bytes for what a client that does not read has not read."""
SEGMENT = 536
"""Bytes of a packet, as over a poor network: by default a system buffers some megabytes of what is sent to
itself."""
TOKENS = 40
"""Of an ordinary answer."""
OTHERS = 8


def room_for(connections: int) -> bool:
    """Open files of this process: as many as that."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return False
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def idle(port: int, count: int) -> AsyncIterator[list[Streams]]:
    """So many connections of the three kinds, in turn."""

    async def one(number: int) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if kind := number % 3:
            writer.write(HALF if kind == 1 else WHOLE)
            await writer.drain()
        if kind == 2:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
        return reader, writer

    made: list[Streams] = []
    try:
        for first in range(0, count, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, count))
            made += await asyncio.gather(*(one(number) for number in numbers))
        yield made
    finally:
        for _, writer in made:
            writer.transport.abort()


async def closed(connections: list[Streams]) -> int:
    """How many the server closed by itself, all of which is waited for."""

    async def one(reader: asyncio.StreamReader) -> bool:
        with suppress(ConnectionError):
            await reader.read()  # what there was of an answer, and the end
        return True

    return sum(await asyncio.gather(*(one(reader) for reader, _ in connections)))


async def answers(port: int, count: int = OTHERS) -> list[float]:
    """Seconds of ordinary answers at the same time, which must be right."""

    async def one(number: int) -> float:
        begun, prompt = time.monotonic(), f"Letter {number}:"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        reply = await ask(port, COMPLETIONS, body)
        assert (reply.end, reply.text) == ("answered", letters_after(prompt, TOKENS))
        return time.monotonic() - begun

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def endless(number: int) -> bytes:
    """A request for more than a client that does not read will ever be sent."""
    said = [{"role": "user", "content": f"Slowly {number}"}]
    body = {"model": MODEL, "messages": said, "max_tokens": 900_000, "logprobs": True, "top_logprobs": 20}
    return request_bytes("/v1/chat/completions", {**body, "stream": True})


@asynccontextmanager
async def slow(port: int, count: int) -> AsyncIterator[list[socket.socket]]:
    """So many clients that ask and do not read; their server has read what they ask."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        made = []
        for number in range(count):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, endless(number))
            made.append(client)
        await until_running(port, least=count)
        yield made


async def health(port: int) -> dict[str, int]:
    found: dict[str, int] = (await exchange(port, request_bytes("/health", method="GET"))).json
    return found


async def until_running(port: int, *, least: int = 0, most: int = 10**9) -> None:
    async with asyncio.timeout(300):
        while not least <= (await health(port))["running"] <= most:
            await asyncio.sleep(0.05)


async def cut(clients: list[socket.socket]) -> int:
    """How many find, reading at last, that the server has cut them off in the middle."""
    loop, found = asyncio.get_running_loop(), 0
    for client in clients:
        received = bytearray()
        with suppress(ConnectionError):
            while piece := await loop.sock_recv(client, 65536):
                received += piece
        found += reply_of(bytes(received)).end in ("cut", "unanswered")
    return found


@dataclass(frozen=True)
class Seen:
    """Resident bytes before, with and after, and seconds of ordinary answers: alone and beside them."""

    before: int
    during: int
    after: int
    alone: float
    beside: float
    ended: int
    seconds: float
    """Until the server was rid of them all."""


async def see_idle(served: Served, count: int) -> Seen:
    before, alone = served.resident_bytes(), statistics.median(await answers(served.port))
    async with idle(served.port, count) as connections:
        begun = time.monotonic()
        beside = statistics.median(await answers(served.port))
        during = served.resident_bytes()
        ended = await closed(connections)
        seconds = time.monotonic() - begun
    return Seen(before, during, served.resident_bytes(), alone, beside, ended, seconds)


async def see_slow(served: Served, count: int) -> Seen:
    before, alone = served.resident_bytes(), statistics.median(await answers(served.port))
    async with slow(served.port, count) as clients:
        begun = time.monotonic()
        during, times = 0, []
        while (await health(served.port))["running"]:
            times += await answers(served.port, 2)
            during = max(during, served.resident_bytes())
        seconds = time.monotonic() - begun
        ended = await cut(clients)
    beside = statistics.median(times)
    return Seen(before, during, served.resident_bytes(), alone, beside, ended, seconds)


async def see_readers(served: Served, count: int) -> float:
    """Seconds of ordinary answers beside as many that ask for the same and read it."""
    asked = [asyncio.create_task(exchange(served.port, endless(number))) for number in range(count)]
    await until_running(served.port, least=count)
    times = [second for _ in range(3) for second in await answers(served.port, 2)]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await until_running(served.port, most=0)
    return statistics.median(times)


def main() -> int:
    options = argparse.ArgumentParser(description="Idle connections, and clients that do not read")
    options.add_argument("--idle", type=int, default=2000)
    options.add_argument("--slow", type=int, default=500)
    options.add_argument("--seconds", type=float, default=20, help="that they are given by the server")
    given = options.parse_args()
    if not room_for(max(given.idle, given.slow)):
        print("This system does not allow so many open files.")
        return 1
    seconds = given.seconds
    limits = {
        "header_timeout": seconds,
        "keep_alive_timeout": round(seconds),
        "send_timeout": seconds,
    }
    with fake_serving(Options(limits, seqs=given.slow + OTHERS), *FEW_FILES) as served:
        idle_seen = asyncio.run(see_idle(served, given.idle))
        print(f"{given.idle} idle:", json.dumps(_told(idle_seen)))
        reading = asyncio.run(see_readers(served, given.slow))
        slow_seen = asyncio.run(see_slow(served, given.slow))
        print(f"{given.slow} that do not read:", json.dumps(_told(slow_seen)))
        print(f"beside {given.slow} that read, an answer takes {reading:.2f} s")
        served.process.terminate()
        code, said = served.exit_code(), served.complaints
    print("exit code:", code, "said:", repr(said[:500]))
    return not (idle_seen.ended == given.idle and slow_seen.ended == given.slow and code == 0 and not said)


def _told(seen: Seen) -> dict[str, float]:
    sizes = {name: round(getattr(seen, name) / 2**20, 1) for name in ("before", "during", "after")}
    times = {name: round(getattr(seen, name), 2) for name in ("alone", "beside", "seconds")}
    return {**sizes, **times, "ended": seen.ended}


if __name__ == "__main__":
    raise SystemExit(main())
