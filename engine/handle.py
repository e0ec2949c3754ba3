"""What a caller holds of a running request. The handle is not the state: closing it cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from chairlift.engine.events import Event, Failed, Finished, FinishReason, TextDelta, TokenLogprob
from chairlift.engine.request import Request
from chairlift.engine.row import RequestTiming


class Mailbox:
    """Events on their way from the engine to one reader.

    Bounded: deltas that the reader has not fetched are merged, so at most one delta and the terminal event
    wait here, however slow the reader is.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Finished | Failed | None = None
        self._delivered_end = False
        self._news = asyncio.Event()

    def put(self, token: int, text: str, logprob: TokenLogprob | None) -> None:
        self._tokens.append(token)
        self._texts.append(text)
        if logprob is not None:
            self._logprobs.append(logprob)
        self._news.set()

    def end(self, event: Finished | Failed) -> None:
        """The first terminal event counts."""
        if self._end is None:
            self._end = event
            self._news.set()

    @property
    def ended(self) -> bool:
        return self._end is not None

    async def get(self) -> Event | None:
        """The next event; None after the terminal one."""
        while True:
            if self._tokens:
                return self._take_delta()
            if self._delivered_end:
                return None
            if self._end is not None:
                self._delivered_end = True
                return self._end
            self._news.clear()
            await self._news.wait()

    def _take_delta(self) -> TextDelta:
        delta = TextDelta(
            tuple(self._tokens),
            "".join(self._texts),
            tuple(self._logprobs),
            tuple(map(len, self._texts)),
        )
        self._tokens, self._texts, self._logprobs = [], [], []
        return delta


class RequestHandle:
    """An async iterator over the events of one request; it ends after `Finished` or `Failed`.

    For one reader, on the engine's event loop. Cancelling, closing, leaving `async with`, or dropping the
    last reference ends the request; its row is free at the next step.
    """

    def __init__(
        self, request: Request, timing: RequestTiming, mailbox: Mailbox, end: Callable[[FinishReason], None]
    ) -> None:
        self.request = request
        self.timing = timing
        self._mailbox = mailbox
        self._end = end
        self._loop = asyncio.get_running_loop()

    def cancel(self) -> None:
        """End the request with `Finished(abort)`, unless it has ended. Idempotent, at any time."""
        self._end(FinishReason.ABORT)

    def finish(self) -> None:
        """End the request with `Finished(stop)`, unless it has ended: the reader has all it wants."""
        self._end(FinishReason.STOP)

    def fail(self) -> None:
        """End the request as one that failed, unless it has ended: its reader cannot go on."""
        self._end(FinishReason.ERROR)

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Event:
        event = await self._mailbox.get()
        if event is None:
            raise StopAsyncIteration
        return event

    def __del__(self) -> None:
        if self._mailbox.ended:
            return
        # The collector may run on any thread, and after the loop is closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, FinishReason.ABORT)
