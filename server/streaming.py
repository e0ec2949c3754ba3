"""From running requests to a response: streamed, or whole. A client that leaves cancels them, either way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from fastapi import Request as HTTPRequest
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.engine.engine import RequestHandle
from chairlift.engine.errors import EngineError
from chairlift.engine.events import Event, Failed, Finished, TextDelta, Usage
from chairlift.server.encoders import Answer, Encoder, Payload
from chairlift.server.errors import CLIENT_CLOSED_REQUEST, APIError, from_engine, internal_error
from chairlift.server.payload import PayloadResponse, dump

logger = logging.getLogger("chairlift.server")

T = TypeVar("T")


def frame(payload: Payload) -> bytes:
    """One server-sent event. JSON has no raw line breaks, so one `data` line holds it."""
    return b"data: " + dump(payload) + b"\n\n"


def error_frame(error: APIError) -> bytes:
    return b"event: error\ndata: " + dump(error.envelope()) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def merge(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, Event]]:
    """The events of all handles as they come, each with its handle's index.

    A handle is asked for its next event only after the one before was taken, so a slow reader lets the
    handle join its deltas instead of piling them up here.
    """
    if len(handles) == 1:
        async for event in handles[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(handle)): index for index, handle in enumerate(handles)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for index, task in sorted((waiting.pop(task), task) for task in done):
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                yield index, event
                waiting[asyncio.ensure_future(anext(handles[index]))] = index
    finally:
        for task in waiting:
            task.cancel()


def _refuse_failure(event: Event) -> TextDelta | Finished:
    if isinstance(event, Failed):
        raise event.error
    return event


async def collect(handles: Sequence[RequestHandle]) -> list[Answer]:
    """Raises: EngineError as soon as one of them fails."""
    answers = [Answer() for _ in handles]
    async with aclosing(merge(handles)) as events:
        async for index, event in events:
            answers[index].add(_refuse_failure(event))
    return answers


async def whole_response(
    http: HTTPRequest, handles: Sequence[RequestHandle], encoder: Encoder, headers: Mapping[str, str]
) -> Response:
    answers = await unless_gone(http, handles, collect(handles))
    if answers is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return PayloadResponse(encoder.whole(answers), headers=headers)


async def unless_gone(
    http: HTTPRequest, handles: Sequence[RequestHandle], collecting: Coroutine[Any, Any, T]
) -> T | None:
    """Wait for the answer and for the client's leaving at once; the first to come decides. None: it left."""
    answering = asyncio.create_task(collecting)
    leaving = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    finally:
        for handle in handles:
            handle.cancel()
        answering.cancel()
        leaving.cancel()


async def _disconnect(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def chunks(handles: Sequence[RequestHandle], encoder: Encoder) -> AsyncGenerator[bytes]:
    """Server-sent events to the end. A failure after the first byte cannot change the status any more: it is
    an `error` event, and no `[DONE]` follows, so that nobody takes the answer for a whole one."""
    try:
        for payload in encoder.opening():
            yield frame(payload)
        usages: list[Usage] = []
        async with aclosing(merge(handles)) as events:
            async for index, event in events:
                event = _refuse_failure(event)
                if isinstance(event, Finished):
                    usages.append(event.usage)
                    yield frame(encoder.closing(index, event))
                elif (chunk := encoder.delta(index, event)) is not None:
                    yield frame(chunk)
        if len(usages) < len(handles):
            raise internal_error()
        if (last := encoder.usage(usages)) is not None:
            yield frame(last)
        yield DONE
    except APIError as error:
        yield error_frame(error)
    except EngineError as error:
        yield error_frame(from_engine(error))
    except Exception:
        logger.exception("a stream failed")
        yield error_frame(internal_error())


class EventStream(EventSourceResponse):
    """A stream that owns its requests: however it ends, they end with it.

    Args:
        frames: server-sent events, as bytes. A generator that fails says so in its own last event.
        ping: what is sent after every `ping_s` seconds.
    """

    def __init__(
        self,
        handles: Sequence[RequestHandle],
        frames: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        ping_s: float,
        ping: Callable[[], ServerSentEvent] | None = None,
    ) -> None:
        super().__init__(frames, headers=headers, sep="\n", ping=ping_s, ping_message_factory=ping or _ping)
        self._handles = tuple(handles)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Not left to the generator: a client that is gone before its first chunk never starts it.
            for handle in self._handles:
                handle.cancel()

    async def _listen_for_exit_signal_with_grace(self) -> None:
        """Upstream polls every 0.5 s, for ever once a stream was served, whether uvicorn was told to exit,
        and then cuts streams off (sse-starlette 3.7). Here the engine ends them (`serve.py`)."""
        await anyio.sleep_forever()


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")
