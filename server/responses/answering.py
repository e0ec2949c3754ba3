"""One response in the making: its events, its end, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from chairlift.engine.errors import EngineError
from chairlift.engine.output.events import EndReason, OutputEnd
from chairlift.engine.output.stream import AnswerBroken, ParsedStream
from chairlift.server.errors import APIError, from_engine, internal_error
from chairlift.server.payload import Payload
from chairlift.server.responses.database import Stored
from chairlift.server.responses.encoder import ResponseEncoder, usage_payload
from chairlift.server.responses.store import ResponseStore

logger = logging.getLogger("chairlift.server")


def pack(events: list[Payload]) -> bytes:
    return zlib.compress(json.dumps(events, ensure_ascii=False).encode())


def unpack(packed: bytes) -> list[Payload]:
    events: list[Payload] = json.loads(zlib.decompress(packed))
    return events


def without_output(response: Payload) -> Payload:
    return {name: value for name, value in response.items() if name != "output"}


@dataclass(eq=False)
class Answering:
    """Reads one parsed answer and writes its response. For one reader of `events`.

    Args:
        conversation: the items of the input, earlier ones included, as they are kept.
        store: None: nothing is kept.
        tenant: whose it is (`Caller.tenant`).
        background: it goes on without a reader, and `log` holds its events.
    """

    id: str
    stream: ParsedStream
    encoder: ResponseEncoder
    conversation: tuple[Payload, ...]
    store: ResponseStore | None
    tenant: str | None = None
    background: bool = False
    keeps_events: bool = False
    response: Payload | None = None
    """Once it has ended."""
    error: EngineError | None = None
    """Why it failed."""
    log: list[Payload] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced whenever something was added to the log."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It has ended, and is kept if it is to be."""
    _ended: Payload | None = None
    _cancelled: bool = False
    _deleted: bool = False
    _logged: bool = False

    @property
    def snapshot(self) -> Payload:
        return self.response or self.encoder.response("in_progress")

    def cancel(self) -> None:
        """Ends it soon with the status `cancelled`, unless it has ended."""
        self._cancelled = True
        self.stream.cancel()

    def forget(self) -> None:
        """Cancel it, and keep nothing of it."""
        self._deleted = True
        self.cancel()

    def abandon(self) -> None:
        """Its reader is gone. What it had read of is kept: it knows the id."""
        if self.settled.is_set():
            return
        if self.response is None:
            self.cancel()
            for _ in self.encoder.finish_items("incomplete"):
                pass
            self.response = self.encoder.response("cancelled", usage=self._counted())
        if self.store is not None and not self._deleted:
            self.store.put_soon(self.id, self._stored(self.response))
        self.settled.set()

    def _counted(self) -> Payload | None:
        """The usage, where the reader left; what was computed and not read counts, too."""
        if self._ended is not None:
            usage = self._ended["usage"]
            assert isinstance(usage, dict)
            return usage
        counted = self.stream.counted()
        return None if counted is None else usage_payload(*counted)

    def append(self, event: Payload | None) -> None:
        """To the log, of whoever answers in the background; None is its end."""
        if event is not None:
            self.log.append(event)
        self._logged = event is None
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def follow(self, after: int) -> AsyncGenerator[Payload]:
        """Of one answered in the background: the events behind number `after`, to the end."""
        position = after + 1
        while True:
            news = self.news
            while position < len(self.log):
                yield self.log[position]
                position += 1
            if self._logged:
                return
            await news.wait()

    async def events(self) -> AsyncGenerator[Payload]:
        """All events, the last one with the response's end. It is kept before that one is sent."""
        for event in self.encoder.opening():
            yield event
        try:
            async with aclosing(self._output()) as events:
                async for event in events:
                    yield event
            response = self._ended or self._fail(AnswerBroken("The answer broke off."))
        except AnswerBroken as error:
            response = self._break(error) if self._cancelled else self._fail(error)
        except EngineError as error:
            response = self._fail(error)
        except Exception:
            logger.exception("a response failed")
            self.stream.fail()
            response = self._fail(EngineError(internal_error().message))
        for event in self.encoder.finish_items("incomplete"):
            yield event
        response["output"] = self.encoder.output
        if self.response is None:
            self.response = response
            await self._keep(response)
            self.settled.set()
        yield self.encoder.closing(self.response)

    async def _output(self) -> AsyncGenerator[Payload]:
        async for event in self.stream:
            if isinstance(event, OutputEnd):
                for payload in self.encoder.end(event):
                    yield payload
                self._ended = self._end(event)
            else:
                for payload in self.encoder.add(event):
                    yield payload

    def _end(self, end: OutputEnd) -> Payload:
        usage = usage_payload(end.usage, end.reasoning_tokens)
        if end.reason is EndReason.LENGTH:
            details = {"reason": "max_output_tokens"}
            return self.encoder.response("incomplete", incomplete_details=details, usage=usage)
        return self.encoder.response("completed", completed_at=int(time.time()), usage=usage)

    def _break(self, error: AnswerBroken) -> Payload:
        usage = None if error.usage is None else usage_payload(error.usage, error.reasoning_tokens)
        return self.encoder.response("cancelled", usage=usage)

    def _fail(self, error: EngineError) -> Payload:
        self.error = error
        envelope = from_engine(error)
        return self.encoder.response("failed", error={"code": "server_error", "message": envelope.message})

    async def _keep(self, response: Payload) -> None:
        """`store` of the response becomes false where it could not be kept."""
        if self.store is None or self._deleted:
            return
        try:
            # Of a long answer, events take a while to be packed.
            stored = await asyncio.to_thread(self._stored, response)
            if self._deleted:  # meanwhile
                return
            kept = await self.store.put(self.id, stored, anew=not self.background)
        except APIError:  # logged by the store
            kept = False
        else:
            if not kept:
                logger.warning("a response was deleted or is larger than the store, and is not kept")
        if not kept:
            response["store"] = False

    def _stored(self, response: Payload) -> Stored:
        output = response["output"]
        assert isinstance(output, list)
        events = pack([*self.log, self.encoder.closing(response)]) if self.keeps_events else None
        return Stored(
            without_output(response), self.conversation, tuple(output), events=events, tenant=self.tenant
        )
