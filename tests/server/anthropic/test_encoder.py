"""Events of any answer, in Anthropic's order, and the message that its client makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from chairlift.engine.events import Usage
from chairlift.engine.output.events import (
    ContentDelta,
    EndReason,
    OutputEnd,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from chairlift.server.anthropic.encoder import MessageEncoder, MessageHead, WholeMessage
from chairlift.server.anthropic.signature import sealed_thinking
from chairlift.server.payload import Payload
from chairlift.server.sealing import SEALED

RAW: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4)
END = OutputEnd(EndReason.STOP, USAGE)


def head(**more: object) -> MessageHead:
    return MessageHead("msg_1", "fake", 10, **more)  # type: ignore[arg-type]


def stream(events: Sequence[OutputEvent | OutputEnd], **more: object) -> list[Payload]:
    encoder = MessageEncoder(head(**more))
    return [encoder.opening(), *(payload for event in events for payload in encoder.encode(event))]


def whole(events: Sequence[OutputEvent | OutputEnd], **more: object) -> Payload:
    message = WholeMessage(MessageEncoder(head(**more)))
    for event in events:
        message.add(event)
    return message.payload()


def accumulated(payloads: Sequence[Payload]) -> Message:
    """What Anthropic's client makes of a stream, each event read by its type."""
    snapshot: Message | None = None
    buffers: dict[int, bytes] = {}
    for payload in payloads:
        event = RAW.validate_json(json.dumps(payload))
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    assert snapshot is not None
    return snapshot


def call(index: int, name: str, *arguments: str) -> list[OutputEvent]:
    pieces = [ToolCallArguments(index, text) for text in arguments]
    return [ToolCallStart(index, f"call_{index}", name), *pieces, ToolCallEnd(index)]


def test_a_stream_with_everything() -> None:
    events: list[OutputEvent | OutputEnd] = [
        ReasoningDelta("Let me "),
        ReasoningDelta("see."),
        ContentDelta("I will "),
        ContentDelta("look."),
        *call(0, "look", '{"at"', ': "it"}'),
        *call(1, "wait", "{}"),
        OutputEnd(EndReason.TOOL_CALLS, USAGE, reasoning_tokens=3),
    ]
    opening, *rest = stream(events)
    assert opening == {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {
                "input_tokens": 10,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        },
    }
    signature = rest[3]["delta"]["signature"]  # type: ignore[index]
    assert isinstance(signature, str) and len(signature) == 44
    assert rest == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "Let me "},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "see."}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "signature_delta", "signature": signature},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "I will "}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "look."}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "call_0", "name": "look", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": '{"at"'},
        },
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": ': "it"}'},
        },
        {"type": "content_block_stop", "index": 2},
        {
            "type": "content_block_start",
            "index": 3,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "wait", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 3,
            "delta": {"type": "input_json_delta", "partial_json": "{}"},
        },
        {"type": "content_block_stop", "index": 3},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None},
            "usage": {
                "input_tokens": 6,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 7,
                "output_tokens_details": {"thinking_tokens": 3},
            },
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("events", "reason", "sequence"),
    [
        ([ContentDelta("a"), END], "end_turn", None),
        ([END], "end_turn", None),
        ([ContentDelta("a"), OutputEnd(EndReason.STOP, USAGE, stop=259)], "end_turn", None),
        ([ContentDelta("a"), OutputEnd(EndReason.STOP, USAGE, stop="END")], "stop_sequence", "END"),
        ([ContentDelta("a"), OutputEnd(EndReason.LENGTH, USAGE)], "max_tokens", None),
        ([*call(0, "f", "{}"), OutputEnd(EndReason.TOOL_CALLS, USAGE)], "tool_use", None),
        ([*call(0, "f", "{}"), OutputEnd(EndReason.TOOL_CALLS, USAGE, stop="x")], "tool_use", None),
        ([RefusalDelta("No."), END], "refusal", None),
    ],
)
def test_stop_reasons(events: list[OutputEvent | OutputEnd], reason: str, sequence: str | None) -> None:
    message = accumulated(stream(events))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert (message.stop_details is not None) == (reason == "refusal")


def test_a_call_that_broke_off_is_given_as_far_as_it_came() -> None:
    events: list[OutputEvent | OutputEnd] = [
        ToolCallStart(0, "call_a", "write"),
        ToolCallArguments(0, '{"path": "/a", "text": "Once up'),
        OutputEnd(EndReason.LENGTH, USAGE),
    ]
    payload = whole(events)
    (block,) = payload["content"]  # type: ignore[misc]
    assert block["input"] == {"path": "/a", "text": "Once up"}
    assert payload["stop_reason"] == "max_tokens"
    assert [event["type"] for event in stream(events)][-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("arguments", ["", "nothing", "[1", '{"a": NaN}', '"x"'])
def test_arguments_that_are_no_object(arguments: str) -> None:
    (block,) = whole([*call(0, "f", arguments), END])["content"]  # type: ignore[misc]
    assert block["input"] == {}


def test_thinking_that_is_not_shown_is_in_its_signature() -> None:
    events: list[OutputEvent | OutputEnd] = [
        ReasoningDelta("Hm, "),
        ReasoningDelta("é"),
        ContentDelta("a"),
        END,
    ]
    payloads = stream(events, omits_thinking=True)
    assert "thinking_delta" not in json.dumps(payloads)
    block = accumulated(payloads).content[0]
    assert block.type == "thinking" and block.thinking == ""
    assert sealed_thinking(block.signature) == "Hm, é"
    shown = accumulated(stream(events)).content[0]
    assert shown.type == "thinking" and shown.thinking == "Hm, é"
    assert sealed_thinking(shown.signature) == ""


def test_signatures_from_elsewhere_hold_nothing() -> None:
    for signature in (None, "", "EqQBCgIYAhIM", *(SEALED + rest for rest in ("", "?", "//8=", "é"))):
        assert sealed_thinking(signature) == ""


def test_edits_of_the_context_are_told_of_at_the_end() -> None:
    edits: Payload = {"applied_edits": []}
    assert "context_management" not in json.dumps(stream([END]))
    assert stream([END], context_management=edits)[-2]["context_management"] == edits
    assert whole([END], context_management=edits)["context_management"] == edits


texts = st.text(st.characters(codec="utf-8"), max_size=6)
arguments = st.dictionaries(texts, st.none() | st.booleans() | st.integers(-9, 9) | texts, max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[OutputEvent | OutputEnd]:
    """Any answer that a parser may give."""
    events: list[OutputEvent | OutputEnd] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "refusal", "call"]), max_size=8)):
        if kind == "call":
            text = json.dumps(draw(arguments), ensure_ascii=draw(st.booleans()))
            at = draw(st.integers(0, len(text)))
            events += call(calls, draw(texts), text[:at], text[at:])
            calls += 1
        else:
            make = {"content": ContentDelta, "reasoning": ReasoningDelta, "refusal": RefusalDelta}[kind]
            events.append(make(draw(texts)))
    reason = EndReason.TOOL_CALLS if calls else draw(st.sampled_from([EndReason.STOP, EndReason.LENGTH]))
    return [*events, OutputEnd(reason, USAGE, draw(st.none() | texts.filter(bool)), draw(st.integers(0, 7)))]


@given(answers())
def test_streamed_or_not_it_is_the_same_message(events: list[OutputEvent | OutputEnd]) -> None:
    streamed = accumulated(stream(events))
    at_once = Message.model_validate_json(json.dumps(whole(events)))
    assert streamed.to_dict() == at_once.to_dict()


@given(answers())
def test_blocks_follow_one_another(events: list[OutputEvent | OutputEnd]) -> None:
    opening, *middle, ending, stop = stream(events)
    assert (opening["type"], ending["type"], stop["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    index, inside = -1, False
    for payload in middle:
        if payload["type"] == "content_block_start":
            assert not inside
            index, inside = index + 1, True
        else:
            assert inside
            inside = payload["type"] != "content_block_stop"
        assert payload["index"] == index
    assert not inside


@given(answers())
def test_no_text_is_lost(events: list[OutputEvent | OutputEnd]) -> None:
    blocks = accumulated(stream(events)).content
    said = [event.text for event in events if isinstance(event, ContentDelta | RefusalDelta)]
    assert "".join(block.text for block in blocks if block.type == "text") == "".join(said)
    thought = [event.text for event in events if isinstance(event, ReasoningDelta)]
    assert "".join(block.thinking for block in blocks if block.type == "thinking") == "".join(thought)
    called = [event.name for event in events if isinstance(event, ToolCallStart)]
    assert [block.name for block in blocks if block.type == "tool_use"] == called
