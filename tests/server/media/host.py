"""A web server on 127.0.0.1 that answers byte for byte what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answers = Callable[[str], bytes]
"""The whole answer to a path. An answer that ends in `MORE` is never finished: the connection stays open. One
that ends in `CUT` is followed by the end of the connection."""
MORE = b"<and more>"
CUT = b"<cut>"


@dataclass
class Host:
    port: int
    connections: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Paths and headers."""

    def url(self, path: str = "/", name: str = "127.0.0.1") -> str:
        return f"http://{name}:{self.port}{path}"


def ok(body: bytes, *headers: str) -> bytes:
    return answer("200 OK", body, f"Content-Length: {len(body)}", *headers)


def answer(status: str, body: bytes, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode() + body


def redirect(to: str, *headers: str) -> bytes:
    return answer("302 Found", b"", f"Location: {to}", *(headers or ("Content-Length: 0",)))


@asynccontextmanager
async def host(answers: Answers) -> AsyncIterator[Host]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                first, *lines = head.strip().split("\r\n")
                path = first.split(" ")[1]
                pairs = (line.partition(": ") for line in lines)
                found.requests.append((path, {name.lower(): value for name, _, value in pairs}))
                reply = answers(path)
                writer.write(reply.removesuffix(MORE).removesuffix(CUT))
                await writer.drain()
                if reply.endswith(CUT):
                    break
                if reply.endswith(MORE):
                    await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    found = Host(server.sockets[0].getsockname()[1])
    try:
        yield found
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
