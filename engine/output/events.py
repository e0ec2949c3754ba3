"""What an answer says, once the model's own marks are read: one vocabulary for every surface.

A parser (`OutputParser`) turns the engine's `TextDelta`s into these events; a surface's encoder turns them
into its own chunks. Fed one character, one token or everything at once, a parser gives the same events, once
adjoining deltas of a kind are joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from chairlift.engine.events import Finished, TextDelta, TokenLogprob, Usage


class EndReason(StrEnum):
    """Why an answer ended, as clients are told."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The answer ended by itself, and holds at least one whole tool call."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer itself. `logprobs` are those of the tokens that came with it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's thinking, its marks left out."""

    text: str


@dataclass(frozen=True, slots=True)
class RefusalDelta:
    """Text in which the model declines, where a format marks it as such."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The name is known; arguments follow. `index` counts the answer's calls from 0; `id` is ours, unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the call's arguments; concatenated, the pieces of a call are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is whole."""

    index: int


OutputEvent = ContentDelta | ReasoningDelta | RefusalDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The answer is over; the last thing said of it."""

    reason: EndReason
    usage: Usage
    stop: str | int | None = None
    """The stop string or token id that ended it."""
    reasoning_tokens: int = 0
    """Of `usage.completion_tokens`, those of the thinking, its marks included."""


class OutputParser(Protocol):
    """Reads one answer. Pure Python, no clock; for one thread."""

    @property
    def done(self) -> bool:
        """Nothing further is wanted: the request may end here."""
        ...

    def feed(self, delta: TextDelta) -> list[OutputEvent]:
        """What the delta completes. Text that may still become a mark is held back."""
        ...

    def finish(self, end: Finished) -> list[OutputEvent | OutputEnd]:
        """What was held back, then exactly one `OutputEnd`. A call that broke off gets no `ToolCallEnd`."""
        ...
