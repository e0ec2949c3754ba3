"""The parser of answers that hold no marks: all text is content."""

from __future__ import annotations

from chairlift.engine.events import Finished, FinishReason, TextDelta
from chairlift.engine.output.events import ContentDelta, EndReason, OutputEnd, OutputEvent


class PlainParser:
    """An `OutputParser` that reads nothing into the text."""

    done = False

    def feed(self, delta: TextDelta) -> list[OutputEvent]:
        if delta.text or delta.logprobs:
            return [ContentDelta(delta.text, delta.logprobs)]
        return []

    def finish(self, end: Finished) -> list[OutputEvent | OutputEnd]:
        return [OutputEnd(end_reason(end), end.usage, end.stop)]


def end_reason(end: Finished) -> EndReason:
    """Of an answer without a whole tool call; what it says of an abort is of no use."""
    return EndReason.LENGTH if end.reason is FinishReason.LENGTH else EndReason.STOP
