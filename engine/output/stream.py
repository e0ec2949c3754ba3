"""A running request as a stream of output events, and its whole answer put together."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from chairlift.engine.errors import EngineError
from chairlift.engine.events import Event, Failed, Finished, FinishReason, TokenLogprob, Usage
from chairlift.engine.output.events import (
    ContentDelta,
    OutputEnd,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


class AnswerBroken(EngineError):
    """The answer ended before it was whole: it was cancelled, or its events stopped."""

    def __init__(self, message: str, usage: Usage | None = None, reasoning_tokens: int = 0) -> None:
        super().__init__(message)
        self.usage = usage
        """What was counted until then; None where nobody can tell."""
        self.reasoning_tokens = reasoning_tokens
        """As in `OutputEnd`."""


class Handle(Protocol):
    """What a stream needs of a `RequestHandle`."""

    @property
    def usage(self) -> Usage | None: ...

    async def __anext__(self) -> Event: ...

    def cancel(self) -> None: ...

    def finish(self) -> None: ...

    def fail(self) -> None: ...


class ParsedStream(AsyncIterator[OutputEvent | OutputEnd]):
    """The output events of one request, ended by exactly one `OutputEnd`. For one reader.

    Cancelling it cancels the request.

    Raises:
        EngineError: (when the next event is asked for) the request failed, or was cancelled.
    """

    def __init__(self, handle: Handle, parser: OutputParser) -> None:
        self.handle = handle
        self._parser = parser
        self._events: deque[OutputEvent | OutputEnd] = deque()
        self._ended = False

    def __aiter__(self) -> ParsedStream:
        return self

    async def __anext__(self) -> OutputEvent | OutputEnd:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            await self._read()
        return self._events.popleft()

    def cancel(self) -> None:
        self.handle.cancel()

    def fail(self) -> None:
        """It cannot be read on: the request ends, and counts as failed."""
        self.handle.fail()

    def counted(self) -> tuple[Usage, int] | None:
        """Of a request that has ended and whose reader is gone: what was counted, and the tokens of thinking
        among what was read. None while it has not ended."""
        if (usage := self.handle.usage) is None:
            return None
        rest = list(self._events)
        if not self._ended:
            rest += self._parser.finish(Finished(FinishReason.ABORT, usage))
        return usage, sum(end.reasoning_tokens for end in rest if isinstance(end, OutputEnd))

    async def _read(self) -> None:
        try:
            event = await self.handle.__anext__()
        except StopAsyncIteration:
            raise AnswerBroken("The answer broke off.") from None
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            last = self._parser.finish(event)
            if event.reason is FinishReason.ABORT:
                thought = sum(end.reasoning_tokens for end in last if isinstance(end, OutputEnd))
                raise AnswerBroken("The answer was cancelled.", event.usage, thought)
            self._ended = True
            self._events.extend(last)
        else:
            self._events.extend(self._parser.feed(event))
            if self._parser.done:
                self.handle.finish()


def parsed(handle: Handle, parser: OutputParser) -> ParsedStream:
    """The events of `handle` as `parser` reads them."""
    return ParsedStream(handle, parser)


@dataclass(slots=True)
class ToolCall:
    """A call as it was put together; `arguments` is JSON unless the answer broke off."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """One answer, put together from its events."""

    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the content's tokens."""
    _end: OutputEnd | None = None
    _texts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, event: OutputEvent | OutputEnd) -> None:
        match event:
            case ContentDelta():
                self._join("content", event.text)
                self.logprobs.extend(event.logprobs)
            case ReasoningDelta():
                self._join("reasoning", event.text)
            case RefusalDelta():
                self._join("refusal", event.text)
            case ToolCallStart():
                self.tool_calls.append(ToolCall(event.id, event.name))
            case ToolCallArguments():
                self._join(f"arguments {event.index}", event.text)
            case ToolCallEnd():
                pass
            case OutputEnd():
                self._end = event
                self._finish()

    @property
    def end(self) -> OutputEnd:
        """Raises: AnswerBroken where none has come."""
        if self._end is None:
            raise AnswerBroken("The answer broke off.")
        return self._end

    def _join(self, name: str, text: str) -> None:
        self._texts.setdefault(name, []).append(text)

    def _finish(self) -> None:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        self.content = texts.get("content", "")
        self.reasoning = texts.get("reasoning", "")
        self.refusal = texts.get("refusal", "")
        for index, call in enumerate(self.tool_calls):
            call.arguments = texts.get(f"arguments {index}", "")
