"""What an answer must be as a whole: thinking, which is free, then content under a constraint, or calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from chairlift.engine.constraints.pieces import (
    Either,
    Literal,
    Piece,
    Regex,
    Repeat,
    Sequence,
    Until,
    Without,
    either,
    optional,
)
from chairlift.engine.output.formats import OutputFormat
from chairlift.engine.output.grammar import Tool
from chairlift.engine.output.harmony import CHANNEL, END, MESSAGE, START
from chairlift.engine.output.whole_calls import WholeCalls
from chairlift.engine.output.writing import FREE, HARMONY_WRITING

_SPACE = Regex(r"[ \t\r\n]{0,8}")
"""What models write behind their thinking; it is no part of the answer."""
_TEXT = Regex(r"(.|\n)*")
_FINAL = Literal(f"{CHANNEL}final{MESSAGE}")


@dataclass(frozen=True, slots=True)
class Calls:
    """What an answer may or must call."""

    tools: tuple[Tool, ...]
    forced: bool = False
    """The answer is a call and nothing else."""
    parallel: bool = True

    @property
    def held(self) -> tuple[Tool, ...]:
        """The tools, those marked that need not follow their schemas: only what is asked for may fail."""
        return tuple(tool if self.forced or _strict(tool) else _freed(tool) for tool in self.tools)

    @property
    def bound(self) -> bool:
        """Their arguments must follow schemas."""
        return bool(self.tools) and (self.forced or self.strict)

    @property
    def strict(self) -> bool:
        """Some call's arguments must follow their schema, whoever chose to call."""
        return any(map(_strict, self.tools))


def _strict(tool: Tool) -> bool:
    function = tool["function"]
    return isinstance(function, Mapping) and bool(function.get("strict"))


def _freed(tool: Tool) -> Tool:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return {**tool, "function": {**function, FREE: True}}


def answer_piece(
    output: OutputFormat,
    *,
    thinks: bool,
    begins: bool,
    content: Piece | None = None,
    calls: Calls | None = None,
) -> Piece | None:
    """The whole answer; None where it may be anything.

    Args:
        thinks: its prompt has opened the thinking.
        begins: it may open it itself: nothing of the answer has been said.
        content: what the content must be; None: any text.
        calls: what may be called.
    """
    if calls is not None and not calls.tools:
        calls = None
    if content is None and (calls is None or not calls.bound):
        return None
    if output.harmony:
        return _harmony(content, calls) if begins else content
    body = _body(output, content, calls)
    return None if body is None else _framed(body, output, thinks=thinks, begins=begins)


def _body(output: OutputFormat, content: Piece | None, calls: Calls | None) -> Piece | None:
    if calls is None:
        return content
    if calls.forced:
        return output.forced_writing.calls(calls.held, parallel=calls.parallel)
    if content is not None:
        # Where nothing reads calls, none can take the content's place.
        return content if output.tools is None else Either((content, _chosen(output, calls)))
    return _mixed(output, calls)


def _chosen(output: OutputFormat, calls: Calls) -> Piece:
    """Calls that the model may make in place of its content, as it writes them."""
    if output.writing is not None:
        return output.writing.calls(calls.held, parallel=calls.parallel)
    assert isinstance(output.tools, WholeCalls)
    native = [Sequence((Literal(start), Until(end))) for start, end in output.tools.marks]
    return Repeat(either(native), 1, None, _SPACE)


def _mixed(output: OutputFormat, calls: Calls) -> Piece | None:
    """Text and calls, whose arguments follow their schemas. None where their form cannot be held to."""
    writing = output.writing
    if writing is None:
        return None
    if not writing.mark:
        return Either((writing.calls(calls.held, parallel=calls.parallel), Without(r"\s*[\[{](.|\n)*")))
    call = Sequence((Until(writing.mark), writing.rest(calls.held, parallel=calls.parallel)))
    # A mark that is a special token is no part of free text.
    special = any(writing.mark.startswith(text) for text in output.ends.values())
    text = _TEXT if special else Without(rf"(.|\n)*{re.escape(writing.mark)}(.|\n)*")
    return Sequence((Repeat(call), text))


def _framed(body: Piece, output: OutputFormat, *, thinks: bool, begins: bool) -> Piece:
    if output.thinking is None or not (thinks or begins):
        return body
    thought = Sequence((Until(output.thinking.end), _SPACE))
    if thinks:
        return Sequence((thought, body))
    return Sequence((optional(Sequence((Literal(output.thinking.start), thought))), body))


def _harmony(content: Piece | None, calls: Calls | None) -> Piece:
    """Thinking and preambles, then a message that ends the answer."""
    message = (Literal(CHANNEL), Regex("analysis|commentary"), Literal(MESSAGE), Until(END))
    thinking = Repeat(Sequence((*message, Literal(f"{START}assistant"))))
    ends: list[Piece] = []
    if calls is None or not calls.forced:
        ends.append(Sequence((_FINAL, content or _TEXT)))
    if calls is not None:
        ends.append(HARMONY_WRITING.calls(calls.held, parallel=False))
    return Sequence((thinking, either(ends)))
