"""What answers are made of, whatever the model: thinking, content, calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift.engine.output.cursor import Cursor, Grammar, Kind, Marks

Tool = Mapping[str, object]
"""A tool as OpenAI's chat API describes it: `{"type": "function", "function": {"name", "parameters", …}}`."""


class Tools:
    """The tools that a request offers."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.given = tuple(tools)
        self.names = frozenset(_name(tool) for tool in tools)


def _name(tool: Tool) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


class ToolFormat(Protocol):
    """How a family writes calls."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Marks that begin a call or several."""
        ...

    @property
    def bare(self) -> bool:
        """An answer may be nothing but calls, without a mark before them."""
        ...

    def read(self, cursor: Cursor, at: int, mark: str, tools: Tools) -> Grammar[bool]:
        """Read the calls behind `mark` (empty: at the front of a bare answer), which ends at this position.

        False, and nothing consumed, where it is no call: then the mark is content.
        """
        ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a family marks its thinking, which stands before everything else."""

    start: str
    end: str
    ends: tuple[str, ...] = ()
    """Marks that end it too, and stay: a call that begins."""


Rest = Callable[[Cursor], Grammar[None]]


def answer(
    cursor: Cursor,
    thinking: Thinking | None,
    tools: Tools | None,
    format: ToolFormat | None,
    drop: Sequence[str],
) -> Grammar[None]:
    """An answer: thinking, then content and calls.

    Args:
        drop: marks that say nothing here, such as those around content.
    """
    if thinking is not None:
        yield from _thinking(cursor, thinking)
    if tools is not None and format is not None:
        if format.bare:
            yield from _bare(cursor, format, tools)
        yield from _content(cursor, (*format.starts, *drop), drop, format, tools)
    else:
        yield from _content(cursor, tuple(drop), drop, None, None)


def _thinking(cursor: Cursor, thinking: Thinking) -> Grammar[None]:
    ends = Marks((thinking.end, *thinking.ends))
    while True:
        at = yield from cursor.space(0)
        if not (yield from cursor.matches(thinking.start, at)):
            return
        cursor.skip(at + len(thinking.start), Kind.REASONING)
        cursor.skip((yield from cursor.space(0)), Kind.REASONING)
        if (yield from cursor.matches(thinking.start, 0)):
            continue  # the model repeats the mark with which its prompt ended
        found = yield from cursor.until(ends, cursor.reasoning)
        if found is None:
            return
        if found.mark == thinking.end:
            cursor.skip(found.length, Kind.REASONING)
            cursor.skip((yield from cursor.space(0)))


def _bare(cursor: Cursor, format: ToolFormat, tools: Tools) -> Grammar[None]:
    at = yield from cursor.space(0)
    yield from format.read(cursor, at, "", tools)


def _content(
    cursor: Cursor, marks: Sequence[str], drop: Sequence[str], format: ToolFormat | None, tools: Tools | None
) -> Grammar[None]:
    """Content and calls, to the end of the answer."""
    searched = Marks(marks)
    while (found := (yield from cursor.until(searched, cursor.content))) is not None:
        if found.mark in drop:
            cursor.skip(found.length)
        elif (
            format is None
            or tools is None
            or not (yield from format.read(cursor, found.length, found.mark, tools))
        ):
            cursor.content(found.length)
            continue
        cursor.skip((yield from cursor.space(0)))
