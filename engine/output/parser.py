"""The one parser of answers: drives a grammar over the text of an answer as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from chairlift.engine.events import Finished, FinishReason, TextDelta
from chairlift.engine.output.cursor import Cursor, Grammar
from chairlift.engine.output.events import EndReason, OutputEnd, OutputEvent
from chairlift.engine.output.plain import end_reason


class AnswerParser:
    """An `OutputParser` for a grammar.

    Args:
        grammar: reads the whole answer; made once, for this cursor.
        ends: text of tokens that ended the answer and are part of its marks.
    """

    def __init__(
        self,
        cursor: Cursor,
        grammar: Callable[[Cursor], Grammar[None]],
        ends: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._cursor = cursor
        self._grammar: Grammar[None] | None = grammar(cursor)
        self._ends = ends
        self._go_on()

    @property
    def done(self) -> bool:
        return self._cursor.done

    def feed(self, delta: TextDelta) -> list[OutputEvent]:
        if self.done:
            return []
        at = 0
        lengths = delta.lengths or (*[0] * (len(delta.token_ids) - 1), len(delta.text))
        for index, length in enumerate(lengths):
            logprob = delta.logprobs[index] if index < len(delta.logprobs) else None
            self._cursor.push(delta.text[at : at + length], logprob)
            at += length
        self._go_on()
        return self._said()

    def finish(self, end: Finished) -> list[OutputEvent | OutputEnd]:
        cursor = self._cursor
        if not self.done:
            if isinstance(end.stop, int) and (text := self._ends.get(end.stop)):
                cursor.push_mark(text)
            cursor.final = True
            cursor.cut = end.reason is FinishReason.LENGTH or isinstance(end.stop, str)
            self._go_on()
            cursor.settle()
        reason = end_reason(end)
        if cursor.done or (reason is EndReason.STOP and cursor.whole_calls):
            reason = EndReason.TOOL_CALLS
        return [*self._said(), OutputEnd(reason, end.usage, end.stop, cursor.reasoning_tokens)]

    def _go_on(self) -> None:
        if self._grammar is None:
            return
        try:
            next(self._grammar)
        except StopIteration:
            self._grammar = None

    def _said(self) -> list[OutputEvent]:
        said, self._cursor.events = self._cursor.events, []
        return said
