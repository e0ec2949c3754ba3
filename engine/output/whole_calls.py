"""Calls that are read when they are whole: their arguments are no JSON text until somebody makes it of them.

The text between the marks goes to mlx-lm's parser of the format (`mlx_lm.tool_parsers`); what comes back is
checked. The text around it, and when it is whole, is found here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import regex

from chairlift.engine.output.cursor import Cursor, Grammar
from chairlift.engine.output.grammar import Tool, Tools
from chairlift.engine.output.json_text import object_text
from chairlift.engine.output.parameters import with_types

log = logging.getLogger(__name__)

Call = tuple[str, str]
"""(name, arguments as JSON)."""
ReadCalls = Callable[[str, Sequence[Tool]], list[Call]]
"""From the text between the marks; raises ValueError where it is no call."""


@dataclass(frozen=True, slots=True)
class WholeCalls:
    """Calls between two marks.

    Args:
        opening: what must stand at the front of the text between the marks, so that text which only looks
            like a mark is content at once.
        calls: makes calls of the text between the marks.
        keep: the marks are part of that text.
    """

    marks: tuple[tuple[str, str], ...]
    opening: regex.Pattern[str]
    calls: ReadCalls
    keep: bool = False
    bare: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(start for start, _ in self.marks)

    def read(self, cursor: Cursor, at: int, mark: str, tools: Tools) -> Grammar[bool]:
        end = next((end for start, end in self.marks if start == mark), "")
        if not (yield from opens(cursor, at, self.opening)):
            return False
        stop = yield from (cursor.find(end, at) if end else _rest(cursor))
        if stop < 0 and cursor.cut:
            return False  # it may be whole by chance only
        reach = len(cursor.text) if stop < 0 else stop
        body = cursor.text[at:reach]
        if self.keep:
            body = mark + body + end
        try:
            calls = self.calls(body, tools.given)
        except ValueError:
            return False
        cursor.skip(reach if stop < 0 else reach + len(end))
        for name, arguments in calls:
            cursor.call(name, arguments)
        return True


def _rest(cursor: Cursor) -> Grammar[int]:
    """Wait for the answer's end."""
    while (yield from cursor.more()):
        pass
    return -1


def opens(cursor: Cursor, at: int, opening: regex.Pattern[str]) -> Grammar[bool]:
    """Whether what stands at this position begins as `opening` says."""
    while True:
        match = opening.match(cursor.text, at, partial=True)
        if match is None:
            return False
        if not match.partial:
            return True
        if not (yield from cursor.more()):
            return False


@dataclass(frozen=True, slots=True)
class UpstreamCalls:
    """`mlx_lm.tool_parsers.<module>`, imported at its first use: mlx-lm takes seconds to import."""

    module: str
    split: regex.Pattern[str] | None = None
    """Between calls that share a pair of marks, where the parser takes one at a time."""

    def __call__(self, body: str, tools: Sequence[Tool]) -> list[Call]:
        parts = [body] if self.split is None else [part for part in self.split.split(body) if part.strip()]
        return [call for part in parts for call in self._calls(part, tools)]

    def _calls(self, body: str, tools: Sequence[Tool]) -> list[Call]:
        parse = importlib.import_module(f"mlx_lm.tool_parsers.{self.module}").parse_tool_call
        # A value that does not fit its declared type is the client's to judge, and no reason to lose the
        # call: without the tools' schemas it stays the text that it is.
        for schemas in (list(tools), None):
            try:
                return checked(parse(body.strip(), schemas), tools)
            except Exception as error:
                log.debug("mlx-lm's %s cannot read a call: %s", self.module, error)
        raise ValueError("no call")


def checked(parsed: object, tools: Sequence[Tool]) -> list[Call]:
    """What a parser made of a call, as (name, JSON). Raises: ValueError where it is none."""
    schemas = _schemas(tools)
    calls: list[Call] = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise ValueError("a call without a name")
        given = call.get("arguments")
        if isinstance(given, dict):
            given = with_types(given, schemas.get(call["name"]))
        arguments = object_text(given)
        if arguments is None:
            raise ValueError("arguments that are no object")
        calls.append((call["name"], arguments))
    if not calls:
        raise ValueError("no call")
    return calls


def _schemas(tools: Sequence[Tool]) -> dict[object, object]:
    """Of the arguments, by the tool's name."""
    functions = (tool.get("function") for tool in tools)
    return {each.get("name"): each.get("parameters") for each in functions if isinstance(each, Mapping)}
