"""One request over a connection of its own, and exactly how it ended: what a client library would hide."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes import letter

PIECE = 65536
PATIENCE = 600.0
"""Seconds for one exchange, after which whoever asks has found that it does not end."""
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """
    Attributes:
        status: None where the connection ended before an answer began.
        body: without the framing of its chunks.
        whole: the answer came to the end that HTTP gives it.
    """

    status: int | None
    body: bytes = b""
    whole: bool = False

    @property
    def streamed(self) -> bool:
        return self.body.startswith((b"data:", b"event:", b":"))

    @property
    def events(self) -> list[dict[str, Any]]:
        """Payloads of a stream, without its end mark."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """Of the error that it ended with, if it did; its type, in Anthropic's form."""
        if not self.whole:
            return None
        last = (self.events or [{}])[-1] if self.streamed else self.json
        error = last.get("error") or last.get("response", {}).get("error")
        return str(error.get("code") or error["type"]) if error else None

    @property
    def end(self) -> str:
        """`answered`; the code of the error that it ended with; `cut`, which nothing may end with; or
        `unanswered`, where nothing came at all."""
        if self.status is None:
            return "unanswered"
        if not self.whole:
            return "cut"
        if (code := self.code) is not None:
            return code
        if self.streamed and not self._has_ended:
            return "cut"
        return "answered" if self.status == 200 else f"status {self.status}"

    @property
    def _has_ended(self) -> bool:
        """With what its surface ends a stream with."""
        lines = [line for line in self.body.split(b"\n") if line and not line.startswith(b":")]
        return lines[-1] == b"data: [DONE]" or self.events[-1].get("type") in LAST_EVENTS

    @property
    def text(self) -> str:
        """Of the first choice of a completion or a chat."""
        text = ""
        for payload in self.events if self.streamed else [self.json]:
            for choice in (one for one in payload["choices"] if not one.get("index")):
                said = choice.get("delta", choice.get("message", choice))
                text += said.get("content", said.get("text")) or ""
        return text


def request_bytes(path: str, body: Body | None = None, *, method: str = "POST") -> bytes:
    content = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def exchange(
    port: int, request: bytes, *, events: int | None = None, hang_up: bool = False, patience: float = PATIENCE
) -> Reply:
    """Send, and read to the end.

    Args:
        events: leave after so many events of a stream; 0: as soon as the request is sent.
        hang_up: tell that nothing more will be sent, of which half a request dies at once.
        patience: in seconds.

    Raises: TimeoutError: it does not end.
    """
    async with asyncio.timeout(patience):
        return await _exchange(port, request, events, hang_up)


async def _exchange(port: int, request: bytes, events: int | None, hang_up: bool) -> Reply:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return Reply(None)
    received = bytearray()
    seen = 0
    try:
        writer.write(request)
        if hang_up:
            writer.write_eof()
        await writer.drain()
        while events is None or seen < events:
            piece = await reader.read(PIECE)
            if not piece:
                break
            received += piece
            seen += piece.count(b"data: ")
    except ConnectionError:
        pass
    finally:
        writer.transport.abort() if events is not None else writer.close()
    return reply_of(bytes(received))


async def ask(
    port: int, path: str, body: Body, *, events: int | None = None, patience: float = PATIENCE
) -> Reply:
    return await exchange(port, request_bytes(path, body), events=events, patience=patience)


def reply_of(received: bytes) -> Reply:
    """What a connection brought until it ended."""
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        return Reply(None)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split()[1])
    if headers.get("transfer-encoding") == "chunked":
        return Reply(status, *_without_chunks(rest))
    return Reply(status, rest, len(rest) == int(headers.get("content-length", len(rest))))


def _without_chunks(rest: bytes) -> tuple[bytes, bool]:
    body, at = bytearray(), 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        if not size:
            return bytes(body), True
        body += rest[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return bytes(body), False


def letters_after(prompt: str, count: int) -> str:
    """What the fake model answers a completion: see `tests.fakes.letters`."""
    tokens = list(prompt.encode())
    begun = len(tokens)
    for _ in range(count):
        tokens.append(letter(tokens))
    return bytes(tokens[begun:]).decode()
