"""Calls whose arguments are JSON text: they are passed on as they come."""

from __future__ import annotations

import re
from dataclasses import dataclass

from chairlift.engine.output.cursor import Cursor, Grammar, Marks
from chairlift.engine.output.grammar import Tools
from chairlift.engine.output.json_text import CallHead, read_head, stream_arguments

_SCALAR = frozenset("0123456789+-.eEtrufalsn")
"""What numbers, true, false and null are made of."""
MOST_HEADER = 300
"""Characters between a call's mark and its arguments."""


@dataclass(frozen=True, slots=True)
class ObjectCalls:
    """A call is an object that holds its name and its arguments; several come one behind the other, or as a
    list: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.

    Args:
        end: the mark behind the calls; empty where there is none.
        known: the name must be that of a tool, since without a mark an object may be an answer, too.
    """

    starts: tuple[str, ...]
    end: str = ""
    bare: bool = False
    known: bool = False

    def read(self, cursor: Cursor, at: int, mark: str, tools: Tools) -> Grammar[bool]:
        at = yield from cursor.space(at)
        listed = cursor.text[at : at + 1] == "["
        if listed:
            at = yield from cursor.space(at + 1)
            if mark and cursor.text[at : at + 1] == "]":
                cursor.skip(at + 1)
                yield from self._leave(cursor)
                return True
        head = yield from self._head(cursor, at, mark, tools)
        if head is None:
            return False
        while head is not None and (yield from self._call(cursor, head)):
            cursor.skip((yield from self._next(cursor)))
            head = yield from self._head(cursor, 0, mark, tools)
        if listed and cursor.text[:1] == "]":
            cursor.skip(1)
        yield from self._leave(cursor)
        return True

    def _head(self, cursor: Cursor, at: int, mark: str, tools: Tools) -> Grammar[CallHead | None]:
        head = yield from read_head(cursor, at, strict=not mark)
        if head is not None and (self.known or not mark) and head.name not in tools.names:
            return None
        return head

    def _call(self, cursor: Cursor, head: CallHead) -> Grammar[bool]:
        cursor.skip(head.at)
        if head.arguments is not None:
            cursor.call(head.name, head.arguments)
            return True
        cursor.start_call(head.name)
        if not (yield from stream_arguments(cursor, self.end)):
            return False
        yield from self._close(cursor)
        return True

    def _close(self, cursor: Cursor) -> Grammar[None]:
        """What is left of the object behind its arguments: other members, the closing bracket."""
        depth, in_string, escaped, value = 1, False, False, False
        while depth and (character := (yield from cursor.char(0))):
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            elif character == '"':
                in_string = True
            elif character in ":,":
                value = character == ":"
            elif not character.isspace() and not ((value or depth > 1) and character in _SCALAR):
                return
            cursor.skip(1)

    def _next(self, cursor: Cursor) -> Grammar[int]:
        """Characters of white space, separators and brackets too many behind a call."""
        return (yield from _past(cursor, ",;}"))

    def _leave(self, cursor: Cursor) -> Grammar[None]:
        """Up to the end mark. What stands before it and is no call is content."""
        if not self.end:
            return
        at = yield from _past(cursor, ",;}]")
        if (yield from cursor.matches(self.end, at)):
            cursor.skip(at + len(self.end))
            return
        if cursor.final and len(cursor.text) > at and self.end.startswith(cursor.text[at:]):
            cursor.skip(len(cursor.text))  # the answer was cut within the mark
            return
        if (found := (yield from cursor.until(Marks([self.end]), cursor.content))) is not None:
            cursor.skip(found.length)


def _past(cursor: Cursor, marks: str) -> Grammar[int]:
    """Characters of white space and of these at the front."""
    at = 0
    while (character := (yield from cursor.char(at))) and (character.isspace() or character in marks):
        at += 1
    return at


@dataclass(frozen=True, slots=True)
class HeaderCalls:
    """A call is a header that names it, a separator, and its arguments:
    `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>`.

    Args:
        section: marks around all calls; empty where there are none.
        call: the mark before a call.
        header: matches from the mark's end to the arguments, and names the call in its group `name`.
        end: the mark behind a call; empty where there is none.
        objects: how calls are read that are written as a list of objects instead.
    """

    section: tuple[str, str]
    call: str
    header: re.Pattern[str]
    end: str = ""
    objects: ObjectCalls | None = None
    bare: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.section[0], self.call) if mark)

    def read(self, cursor: Cursor, at: int, mark: str, tools: Tools) -> Grammar[bool]:
        if self.objects is not None:
            inside = yield from cursor.space(at)
            if cursor.text[inside : inside + 1] == "[":
                return (yield from self.objects.read(cursor, at, mark, tools))
        if mark == self.section[0]:
            at = yield from cursor.space(at)
            if not (yield from cursor.matches(self.call, at)):
                return False
            at += len(self.call)
        head = yield from self._head(cursor, at)
        if head is None:
            return False
        while head is not None:
            cursor.skip(head.at)
            cursor.start_call(head.name)
            if not (yield from stream_arguments(cursor, self.end)):
                break
            head = yield from self._next(cursor)
        yield from self._leave(cursor)
        return True

    def _head(self, cursor: Cursor, at: int) -> Grammar[CallHead | None]:
        """The header, up to the bracket that opens the arguments."""
        brace = yield from self._find_brace(cursor, at)
        if brace < 0 or (match := self.header.fullmatch(cursor.text, at, brace)) is None:
            return None
        inside = yield from cursor.space(brace + 1)
        return CallHead(match["name"], brace) if cursor.text[inside : inside + 1] in ('"', "}") else None

    def _find_brace(self, cursor: Cursor, at: int) -> Grammar[int]:
        for position in range(at, at + MOST_HEADER):
            character = yield from cursor.char(position)
            if character in ("{", ""):
                return position if character else -1
        return -1

    def _next(self, cursor: Cursor) -> Grammar[CallHead | None]:
        at = yield from cursor.space(0)
        if self.end:
            # DeepSeek V3 fences its arguments; the fence's own line belongs to the mark.
            if (yield from cursor.matches("```", at)):
                at = yield from cursor.space(at + 3)
            if not (yield from cursor.matches(self.end, at)):
                return None
            cursor.skip(at + len(self.end))
            at = yield from cursor.space(0)
        if not (yield from cursor.matches(self.call, at)):
            return None
        return (yield from self._head(cursor, at + len(self.call)))

    def _leave(self, cursor: Cursor) -> Grammar[None]:
        end = self.section[1]
        if not end:
            return
        at = yield from cursor.space(0)
        if (yield from cursor.matches(end, at)):
            cursor.skip(at + len(end))
