"""Where a parser stands in an answer's text, and what it has said of the text before that.

A grammar is a generator that looks at `Cursor.text`, says what it is, and yields where it needs more of it.
What it decides depends on the text alone, never on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from chairlift.engine.events import TokenLogprob
from chairlift.engine.output.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

T = TypeVar("T")
Grammar = Generator[None, None, T]
"""Resumed when there is more text, or none will come (`Cursor.final`)."""
MakeID = Callable[[], str]


class Kind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    """The thinking, its marks and the white space around them included."""
    OTHER = "other"
    """Marks and calls."""


@dataclass(slots=True)
class _Token:
    start: int
    """Offset in the raw text at which its own text begins."""
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Found:
    """A mark at the front of the unread text, behind `space` characters of white space."""

    space: int
    mark: str

    @property
    def length(self) -> int:
        return self.space + len(self.mark)


class Marks:
    """Fixed strings to look for. None may be part of another: which one came first would depend on how the
    text is cut."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(dict.fromkeys(mark for mark in marks if mark))
        assert not any(a in b for a in self.marks for b in self.marks if a != b), self.marks
        self._longest = max(map(len, self.marks), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        self._beginning = re.compile("|".join({re.escape(mark[0]) for mark in self.marks}) or r"(?!)")

    def search(self, text: str) -> re.Match[str] | None:
        return self._pattern.search(text)

    def held(self, text: str) -> int:
        """Length of the longest end of `text` that may become a mark."""
        for match in self._beginning.finditer(text, max(0, len(text) - self._longest + 1)):
            end = text[match.start() :]
            if any(mark.startswith(end) for mark in self.marks):
                return len(end)
        return 0


class Cursor:
    """Args: prefix: text of the answer that the prompt holds already; it is read, and nothing said of it."""

    def __init__(self, make_id: MakeID, *, prefix: str = "", parallel: bool = True) -> None:
        self.text = prefix
        """What is not read yet."""
        self.final = False
        """No more text will come."""
        self.cut = False
        """Final, and the model had more to say."""
        self.done = False
        """One call is whole and no more are wanted."""
        self.events: list[OutputEvent] = []
        self.reasoning_tokens = 0
        self.whole_calls = 0
        self._make_id = make_id
        self._parallel = parallel
        self._prefix = len(prefix)
        self._read = 0  # characters read so far
        self._fed = len(prefix)
        self._tokens: deque[_Token] = deque()
        self._calls = 0
        self._kind = Kind.CONTENT

    def push(self, text: str, logprob: TokenLogprob | None) -> None:
        """One token and the text that it completed."""
        self._tokens.append(_Token(self._fed, logprob))
        self._fed += len(text)
        self.text += text

    def push_mark(self, mark: str) -> None:
        """The text of the token that ended the answer, where it is a mark."""
        self._fed += len(mark)
        self.text += mark

    def settle(self) -> None:
        """At the end: tokens without text are of the kind of what precedes them."""
        logprobs = self._count(self._fed + 1, self._kind)
        if logprobs:
            self._say(ContentDelta("", logprobs))

    # -- what the text at the front is

    def content(self, length: int) -> None:
        text, logprobs = self._take(length, Kind.CONTENT)
        if text or logprobs:
            self._say(ContentDelta(text, logprobs))

    def reasoning(self, length: int) -> None:
        text, _ = self._take(length, Kind.REASONING)
        if text:
            self._say(ReasoningDelta(text))

    def skip(self, length: int, kind: Kind = Kind.OTHER) -> None:
        """A mark, or what was said in other words."""
        self._take(length, kind)

    def start_call(self, name: str) -> None:
        self._say(ToolCallStart(self._calls, self._make_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._say(ToolCallArguments(self._calls - 1, text))

    def end_call(self) -> None:
        self._say(ToolCallEnd(self._calls - 1))
        self.whole_calls += 1
        self.done = self.done or not self._parallel

    def call(self, name: str, arguments: str) -> None:
        """All of it at once."""
        self.start_call(name)
        self.arguments(arguments)
        self.end_call()

    def _say(self, event: OutputEvent) -> None:
        if not self.done:
            self.events.append(event)

    def _take(self, length: int, kind: Kind) -> tuple[str, tuple[TokenLogprob, ...]]:
        if not length:
            return "", ()
        said = self.text[max(0, self._prefix - self._read) : length]
        self.text = self.text[length:]
        self._read += length
        self._kind = kind
        return said, self._count(self._read, kind)

    def _count(self, before: int, kind: Kind) -> tuple[TokenLogprob, ...]:
        """Tokens whose text begins before this offset are of this kind."""
        logprobs: list[TokenLogprob] = []
        while self._tokens and self._tokens[0].start < before:
            token = self._tokens.popleft()
            if kind is Kind.REASONING:
                self.reasoning_tokens += 1
            elif kind is Kind.CONTENT and token.logprob is not None:
                logprobs.append(token.logprob)
        return tuple(logprobs)

    # -- looking ahead

    def more(self) -> Grammar[bool]:
        """Wait for more text; False where none will come."""
        if self.final:
            return False
        yield
        return True

    def char(self, at: int) -> Grammar[str]:
        """The character at this position of the unread text; empty beyond the end."""
        while at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[at]

    def space(self, at: int) -> Grammar[int]:
        """Position of the first character from `at` on that is no white space."""
        while True:
            rest = self.text[at:].lstrip()
            if rest:
                return len(self.text) - len(rest)
            if not (yield from self.more()):
                return len(self.text)

    def matches(self, mark: str, at: int) -> Grammar[bool]:
        """Whether `mark` stands at this position."""
        while True:
            seen = self.text[at : at + len(mark)]
            if not mark.startswith(seen):
                return False
            if len(seen) == len(mark):
                return True
            if not (yield from self.more()):
                return False

    def find(self, mark: str, at: int) -> Grammar[int]:
        """Position of the first `mark` from `at` on; -1 where the answer ends without."""
        while (found := self.text.find(mark, at)) < 0:
            at = max(at, len(self.text) - len(mark) + 1)
            if not (yield from self.more()):
                return -1
        return found

    def until(self, marks: Marks, say: Callable[[int], None]) -> Grammar[Found | None]:
        """Say of all text before the first mark what it is. The mark stays, with the white space before it;
        None where the answer ends without one."""
        while True:
            match = marks.search(self.text)
            if match is not None:
                before = len(self.text[: match.start()].rstrip())
                say(before)
                return Found(match.start() - before, match.group())
            if self.final:
                say(len(self.text))
                return None
            safe = len(self.text) - marks.held(self.text)
            say(len(self.text[:safe].rstrip()))
            yield
