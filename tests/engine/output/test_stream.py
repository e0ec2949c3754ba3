"""A request's events parsed as they come, and put together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift.engine.errors import EngineError, StepFailed
from chairlift.engine.events import Event, Failed, Finished, FinishReason, TextDelta, TokenLogprob, Usage
from chairlift.engine.output.events import (
    ContentDelta,
    EndReason,
    OutputEnd,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from chairlift.engine.output.formats import choose_format
from chairlift.engine.output.plain import PlainParser
from chairlift.engine.output.stream import AnswerBroken, ToolCall, WholeAnswer, parsed
from tests.fake_tokenizer import FakeTokenizer

USAGE = Usage(3, 2)


class Replay:
    """A handle whose events are known."""

    usage: Usage | None = None

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = iter(events)
        self.cancelled = False

    async def __anext__(self) -> Event:
        for event in self._events:
            return event
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self) -> None:
        raise AssertionError("nobody asked for that")

    def fail(self) -> None:
        raise AssertionError("nobody asked for that")


async def test_plain_text_is_content() -> None:
    logprob = TokenLogprob(2, -1.0)
    handle = Replay(
        [
            TextDelta((1,), "a"),
            TextDelta((3,), ""),
            TextDelta((2,), "b", (logprob,)),
            Finished(FinishReason.STOP, USAGE, 7),
        ]
    )
    assert [event async for event in parsed(handle, PlainParser())] == [
        ContentDelta("a"),
        ContentDelta("b", (logprob,)),
        OutputEnd(EndReason.STOP, USAGE, 7),
    ]


async def test_length_is_told() -> None:
    stream = parsed(Replay([Finished(FinishReason.LENGTH, USAGE)]), PlainParser())
    assert [event async for event in stream] == [OutputEnd(EndReason.LENGTH, USAGE)]


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (Failed(StepFailed("It failed."), USAGE), StepFailed),
        (Finished(FinishReason.ABORT, USAGE), AnswerBroken),
        (None, AnswerBroken),
    ],
)
async def test_what_is_no_answer_raises(last: Event | None, error: type[EngineError]) -> None:
    stream = parsed(Replay([TextDelta((1,), "a"), *([] if last is None else [last])]), PlainParser())
    assert await anext(stream) == ContentDelta("a")
    with pytest.raises(error):
        await anext(stream)


async def test_what_a_cancelled_answer_has_cost_is_told() -> None:
    parser = choose_format(FakeTokenizer(), reasoning="think", tool_call="hermes").parser()
    deltas = [TextDelta((1, 2), "<think>hm"), TextDelta((3,), "m</think>a")]
    stream = parsed(Replay([*deltas, Finished(FinishReason.ABORT, Usage(5, 3))]), parser)
    with pytest.raises(AnswerBroken) as broken:
        async for _ in stream:
            pass
    assert (broken.value.usage, broken.value.reasoning_tokens) == (Usage(5, 3), 3)


async def test_cancelling_a_stream_cancels_its_request() -> None:
    handle = Replay([])
    parsed(handle, PlainParser()).cancel()
    assert handle.cancelled


def test_a_whole_answer() -> None:
    answer = WholeAnswer()
    end = OutputEnd(EndReason.TOOL_CALLS, USAGE, reasoning_tokens=1)
    for event in (
        ReasoningDelta("h"),
        ReasoningDelta("m"),
        ContentDelta("o", (TokenLogprob(1, -1.0),)),
        ContentDelta("k"),
        RefusalDelta("no"),
        ToolCallStart(0, "c0", "f"),
        ToolCallArguments(0, '{"a"'),
        ToolCallArguments(0, ": 1}"),
        ToolCallEnd(0),
        ToolCallStart(1, "c1", "g"),
        ToolCallArguments(1, "{"),
    ):
        answer.add(event)
    with pytest.raises(AnswerBroken):
        _ = answer.end
    answer.add(end)
    assert (answer.reasoning, answer.content, answer.refusal) == ("hm", "ok", "no")
    assert answer.tool_calls == [ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "{")]
    assert answer.logprobs == [TokenLogprob(1, -1.0)]
    assert answer.end == end


async def test_what_is_counted_where_the_reader_left() -> None:
    parser = choose_format(FakeTokenizer(template="<think></think>")).parser()
    handle = Replay([TextDelta((1, 2), "<think>h", (), (7, 1)), TextDelta((3,), "m")])
    stream = parsed(handle, parser)
    assert await anext(stream) == ReasoningDelta("h")
    assert stream.counted() is None
    handle.usage = Usage(5, 3, 1)
    assert stream.counted() == (Usage(5, 3, 1), 2)  # the third token was not read
