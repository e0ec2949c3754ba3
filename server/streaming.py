"""From parsed answers to a response: streamed, or whole. A client that leaves cancels them, either way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import anyio
from fastapi import Request as HTTPRequest
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from chairlift.engine.errors import EngineError
from chairlift.engine.output.events import OutputEnd, OutputEvent
from chairlift.engine.output.stream import ParsedStream, WholeAnswer
from chairlift.server.encoders import Encoder
from chairlift.server.errors import CLIENT_CLOSED_REQUEST, APIError, from_engine, internal_error
from chairlift.server.payload import Payload, PayloadResponse, dump

logger = logging.getLogger("chairlift.server")

T = TypeVar("T")


class Cancellable(Protocol):
    """A running request: a `RequestHandle` or the `ParsedStream` of one."""

    def cancel(self) -> None: ...

    def fail(self) -> None: ...


def frame(payload: Payload, event: str | None = None) -> bytes:
    """One server-sent event. JSON has no raw line breaks, so one `data` line holds it."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + dump(payload) + b"\n\n"


def error_frame(error: APIError) -> bytes:
    return frame(error.envelope(), "error")


DONE = b"data: [DONE]\n\n"


async def merge(streams: Sequence[ParsedStream]) -> AsyncGenerator[tuple[int, OutputEvent | OutputEnd]]:
    """The events of all streams as they come, each with its stream's index.

    A stream is asked for its next event only after the one before was taken, so a slow reader lets the
    handle join its deltas instead of piling them up here.

    Raises: EngineError as soon as one of them fails.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                yield index, event
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            # One that has failed beside the first has been read with this, so that nobody warns of it.
            if not task.cancel() and not task.cancelled():
                task.exception()


async def collect(streams: Sequence[ParsedStream]) -> list[WholeAnswer]:
    """Raises: EngineError as soon as one of them fails."""
    answers = [WholeAnswer() for _ in streams]
    async with aclosing(merge(streams)) as events:
        async for index, event in events:
            answers[index].add(event)
    return answers


async def whole_response(
    http: HTTPRequest, streams: Sequence[ParsedStream], encoder: Encoder, headers: Mapping[str, str]
) -> Response:
    answers = await unless_gone(http, streams, collect(streams))
    if answers is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if encoder.heavy:
        return await asyncio.to_thread(lambda: PayloadResponse(encoder.whole(answers), headers=headers))
    return PayloadResponse(encoder.whole(answers), headers=headers)


async def unless_gone(
    http: HTTPRequest, answers: Sequence[Cancellable], collecting: Coroutine[Any, Any, T]
) -> T | None:
    """Wait for the answer and for the client's leaving at once; the first to come decides. None: it left."""
    answering = asyncio.create_task(collecting)
    leaving = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    except (APIError, EngineError):
        raise
    except Exception:
        for answer in answers:
            answer.fail()
        raise
    finally:
        for answer in answers:
            answer.cancel()
        answering.cancel()
        leaving.cancel()


async def _disconnect(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def chunks(streams: Sequence[ParsedStream], encoder: Encoder) -> AsyncGenerator[bytes]:
    """Server-sent events to the end. A failure after the first byte cannot change the status any more: it is
    an `error` event, and no `[DONE]` follows, so that nobody takes the answer for a whole one."""
    try:
        for payload in encoder.opening():
            yield frame(payload)
        ends: dict[int, OutputEnd] = {}
        async with aclosing(merge(streams)) as events:
            async for index, event in events:
                if isinstance(event, OutputEnd):
                    ends[index] = event
                    yield frame(encoder.closing(index, event))
                elif encoder.heavy:
                    if (chunk := await asyncio.to_thread(encoder.delta, index, event)) is not None:
                        yield frame(chunk)
                elif (chunk := encoder.delta(index, event)) is not None:
                    yield frame(chunk)
        if (last := encoder.usage([ends[index] for index in sorted(ends)])) is not None:
            yield frame(last)
        yield DONE
    except APIError as error:
        yield error_frame(error)
    except EngineError as error:
        yield error_frame(from_engine(error))
    except Exception:
        logger.exception("a stream failed")
        for stream in streams:
            stream.fail()
        yield error_frame(internal_error())


class EventStream(EventSourceResponse):
    """A stream that owns its requests: however it ends, they end with it.

    Args:
        frames: server-sent events, as bytes. A generator that fails says so in its own last event.
        ping: what is sent after every `ping_s` seconds.
    """

    def __init__(
        self,
        answers: Sequence[Cancellable],
        frames: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        ping_s: float,
        ping: Callable[[], ServerSentEvent] | None = None,
    ) -> None:
        super().__init__(frames, headers=headers, sep="\n", ping=ping_s, ping_message_factory=ping or _ping)
        self._answers = tuple(answers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Not left to the generator: a client that is gone before its first chunk never starts it.
            for answer in self._answers:
                answer.cancel()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Upstream makes a cancel scope for every chunk, with a time-out or without; here there is none."""
        await send(message)

    async def _listen_for_exit_signal_with_grace(self) -> None:
        """Upstream polls every 0.5 s, for ever once a stream was served, whether uvicorn was told to exit,
        and then cuts streams off (sse-starlette 3.7). Here the engine ends them (`serve.py`)."""
        await anyio.sleep_forever()


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")
