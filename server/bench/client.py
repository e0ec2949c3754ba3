"""One streamed chat completion, timed.

Times are taken when bytes arrive, before they are parsed: chunks that arrive in one read have the same time,
so the gap between them is 0 and the wait before them counts once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import perf_counter

import httpx

Clock = Callable[[], float]
Message = dict[str, str]


@dataclass(slots=True)
class Measured:
    """What one request did. Seconds on the client's clock."""

    kind: str
    max_tokens: int
    started: float
    finished: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """When each chunk that held content arrived; role-only and empty chunks do not count."""
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """From the server's usage; None where it sent none."""
    cached_tokens: int | None = None
    error: str | None = None
    """The kind of failure, such as `HTTP 429`, `connection`, `timeout`, `truncated stream`."""
    detail: str = ""
    """What the server or the connection said, one line."""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first content; None where none came."""
        return self.chunk_times[0] - self.started if self.chunk_times else None

    @property
    def e2e(self) -> float:
        return self.finished - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between one content chunk and the next."""
        return [later - sooner for sooner, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Completion tokens by usage, else one a content chunk."""
        return len(self.chunk_times) if self.completion_tokens is None else self.completion_tokens

    @property
    def seconds_per_token(self) -> float | None:
        """From the first content to the last, over the tokens after the first; None below two tokens, or
        where all content came in one chunk."""
        if len(self.chunk_times) < 2 or self.tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.tokens - 1)


class _StreamError(Exception):
    """The stream said that the request failed, or is not what it should be."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


async def stream_chat(
    client: httpx.AsyncClient,
    messages: list[Message],
    *,
    model: str | None,
    max_tokens: int,
    kind: str = "",
    clock: Clock = perf_counter,
    on_content: Callable[[], None] | None = None,
) -> Measured:
    """Send one greedy request and read its stream to the end. Never raises for what the server does.

    `on_content` is called once, when the first content has arrived.
    """
    body: dict[str, object] = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        body["model"] = model
    measured = Measured(kind=kind, max_tokens=max_tokens, started=clock())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raw = await response.aread()
                raise _StreamError(f"HTTP {response.status_code}", _message_of(raw))
            await _read(response.aiter_bytes(), measured, clock, on_content)
    except _StreamError as error:
        measured.error, measured.detail = error.kind, str(error)
    except httpx.TimeoutException as error:
        measured.error, measured.detail = "timeout", _line(error)
    except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.CloseError) as error:
        measured.error, measured.detail = "connection", _line(error)
    except httpx.HTTPError as error:
        measured.error, measured.detail = "protocol", _line(error)
    measured.finished = clock()
    return measured


async def _read(
    stream: AsyncIterator[bytes], measured: Measured, clock: Clock, on_content: Callable[[], None] | None
) -> None:
    done = False
    async for arrived, data in events(stream, clock):
        if data == "[DONE]":
            done = True
            break
        _apply(data, arrived, measured)
        if on_content is not None and measured.chunk_times:
            on_content()
            on_content = None
    if not done and measured.finish_reason is None:
        raise _StreamError("truncated stream", "The stream ended with neither a finish_reason nor [DONE].")


async def events(stream: AsyncIterator[bytes], clock: Clock) -> AsyncIterator[tuple[float, str]]:
    """(time of arrival, data) of each server-sent event; comments and other fields are skipped.

    Lines end at LF, or CR LF. They are split as bytes: text splitting would also break at the line
    separators that JSON may hold unescaped.
    """
    buffer = b""
    data: list[str] = []
    async for piece in stream:
        arrived = clock()
        *lines, buffer = (buffer + piece).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield arrived, "\n".join(data)
                data = []


def _apply(data: str, arrived: float, measured: Measured) -> None:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise _StreamError("bad chunk", f"A chunk is no JSON: {data[:80]}") from None
    if not isinstance(chunk, dict):
        raise _StreamError("bad chunk", f"A chunk is no JSON object: {data[:80]}")
    if chunk.get("error"):
        raise _StreamError("error event", _message_of(data.encode()))
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        if content or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
            measured.chunk_times.append(arrived)
            measured.text += content
        if choice.get("finish_reason"):
            measured.finish_reason = choice["finish_reason"]
    usage = chunk.get("usage")
    if usage:
        measured.prompt_tokens = usage.get("prompt_tokens")
        measured.completion_tokens = usage.get("completion_tokens")
        measured.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _message_of(body: bytes) -> str:
    """The message of an OpenAI error envelope, or the start of whatever came instead."""
    try:
        error = json.loads(body)["error"]
        return _line(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return _line(body.decode("utf-8", "replace") or "no message")


def _line(what: object) -> str:
    text = " ".join(str(what).split()) or type(what).__name__
    return text if len(text) <= 200 else text[:197] + "..."
