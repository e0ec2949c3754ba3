"""What a caller holds of a running request. The handle is not the state: closing it cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from chairlift.engine.events import Event, Failed, Finished, FinishReason, TextDelta, TokenLogprob, Usage
from chairlift.engine.request import Request
from chairlift.engine.row import RequestTiming


class Mailbox:
    """Events on their way from the engine to one reader.

    Bounded: deltas that the reader has not fetched are merged, so at most one delta and the terminal event
    wait here, however slow the reader is.
    """

    def __init__(self) -> None:
        self.prompt: tuple[TokenLogprob, ...] = ()
        """Of the prompt's tokens from the second on, where asked for; there before the first delta."""
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Finished | Failed | None = None
        self._delivered_end = False
        self._when_ended: list[Callable[[], None]] = []
        self._reader: asyncio.Future[None] | None = None
        """Waits for news."""

    def put(self, token: int, text: str, logprob: TokenLogprob | None) -> None:
        self._tokens.append(token)
        self._texts.append(text)
        if logprob is not None:
            self._logprobs.append(logprob)
        self._tell()

    def end(self, event: Finished | Failed) -> None:
        """The first terminal event counts."""
        if self._end is None:
            self._end = event
            self._tell()
            for call in self._when_ended:
                call()

    @property
    def outcome(self) -> Finished | Failed | None:
        """The terminal event, whether or not it was fetched."""
        return self._end

    def when_ended(self, call: Callable[[], None]) -> None:
        """To be called, once, with the terminal event, which has not come yet. It must not raise."""
        self._when_ended.append(call)

    @property
    def usage(self) -> Usage | None:
        """Of an answer that has ended, read or not."""
        return None if self._end is None else self._end.usage

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
            self._reader = news = asyncio.get_running_loop().create_future()
            await news

    def _tell(self) -> None:
        # One reader, so a future does; an event's queue of waiters costs several times as much.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

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

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the prompt's tokens from the second on, where asked for; there with the first delta."""
        return self._mailbox.prompt

    @property
    def usage(self) -> Usage | None:
        """What was counted, once the request has ended: at once after `cancel`."""
        return self._mailbox.usage

    def cancel(self) -> None:
        """End the request with `Finished(abort)`, unless it has ended. Idempotent, at any time."""
        self._end(FinishReason.ABORT)

    def finish(self) -> None:
        """End the request with `Finished(stop)`, unless it has ended: the reader has all it wants."""
        self._end(FinishReason.STOP)

    def fail(self) -> None:
        """End the request as one that failed, unless it has ended: its reader cannot go on."""
        self._end(FinishReason.ERROR)

    @property
    def outcome(self) -> Finished | Failed | None:
        """How the request ended, whether or not its reader got there; None while it runs."""
        return self._mailbox.outcome

    @property
    def ended(self) -> bool:
        return self._mailbox.outcome is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this once, on the event loop, when the request ends: it has not, and `call` must not raise."""
        self._mailbox.when_ended(call)

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
        if self._mailbox.outcome is not None:
            return
        # The collector may run on any thread, and after the loop is closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, FinishReason.ABORT)
