"""The events of a response, and the response: in order, in the SDK's eyes, and however they are cut."""

from __future__ import annotations

import openai
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState

from chairlift.engine.events import TokenLogprob, Usage
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
from chairlift.server.logprobs import TokenTexts
from chairlift.server.responses.encoder import ResponseEncoder, usage_payload
from chairlift.server.sealing import SEALED, unseal
from tests.fake_tokenizer import FakeTokenizer
from tests.server.harness import JSON
from tests.server.responses.asking import EVENTS, checked, checked_events

BASE: JSON = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "fake",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def call(index: int, name: str, *arguments: str) -> list[OutputEvent]:
    pieces = [ToolCallArguments(index, text) for text in arguments]
    return [ToolCallStart(index, f"call_{index}", name), *pieces, ToolCallEnd(index)]


def encoded(
    output: list[OutputEvent],
    reason: EndReason = EndReason.STOP,
    *,
    texts: TokenTexts | None = None,
    summarize: bool = False,
    seal_reasoning: bool = False,
) -> list[JSON]:
    encoder = ResponseEncoder(BASE, texts, summarize=summarize, seal_reasoning=seal_reasoning)
    events = encoder.opening()
    for event in output:
        events += encoder.add(event)
    events += encoder.end(OutputEnd(reason, Usage(3, 4)))
    status = "incomplete" if reason is EndReason.LENGTH else "completed"
    return checked_events([*events, encoder.closing(encoder.response(status))])


def kinds(events: list[JSON]) -> list[str]:
    """Between the opening and the last event, without the prefix they share."""
    return [str(event["type"]).removeprefix("response.") for event in events[2:-1]]


def response_of(events: list[JSON]) -> JSON:
    response = events[-1]["response"]
    assert isinstance(response, dict)
    return checked(response)


def output_of(events: list[JSON]) -> list[JSON]:
    output = response_of(events)["output"]
    assert isinstance(output, list)
    return output


def test_text() -> None:
    events = encoded([ContentDelta("Hel"), ContentDelta("lo")])
    assert kinds(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    (item,) = output_of(events)
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    assert str(item["id"]).startswith("msg_")
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    assert events[2]["item"] == {**item, "status": "in_progress", "content": []}
    assert events[3].items() >= {**place, "part": {**part, "text": ""}}.items()
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert all(event.items() >= {**place, "logprobs": []}.items() for event in events[4:7])
    assert events[6]["text"] == "Hello"
    assert events[7]["part"] == part
    assert events[8]["item"] == item


def test_reasoning_then_text() -> None:
    events = encoded([ReasoningDelta("Hm"), ReasoningDelta("m."), ContentDelta("Yes.")])
    assert kinds(events)[:7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert kinds(events)[7] == "output_item.added" and events[9]["output_index"] == 1
    reasoning, message = output_of(events)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert reasoning["summary"] == [] and "encrypted_content" not in reasoning
    assert message["type"] == "message"


def test_reasoning_as_a_summary() -> None:
    events = encoded([ReasoningDelta("Hm"), ReasoningDelta("m."), ContentDelta("Yes.")], summarize=True)
    assert kinds(events)[:7] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert events[4]["summary_index"] == 0
    reasoning, _ = output_of(events)
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hmm."}]
    assert reasoning["content"] == []


def test_reasoning_sealed() -> None:
    events = encoded([ReasoningDelta("Hm"), ReasoningDelta("m…"), ContentDelta("Yes.")], seal_reasoning=True)
    sealed = output_of(events)[0]["encrypted_content"]
    assert isinstance(sealed, str) and unseal(sealed) == "Hmm…"
    assert events[2]["item"] == {**output_of(events)[0], **_empty_reasoning()}


def _empty_reasoning() -> JSON:
    return {"status": "in_progress", "content": [], "summary": [], "encrypted_content": None}


def test_what_others_sealed_cannot_be_read() -> None:
    assert unseal("gAAAAABo") is None
    assert unseal(SEALED + "###") is None
    assert unseal(SEALED + "/w==") is None  # no UTF-8


def test_calls() -> None:
    output = [ContentDelta("Let me see."), *call(0, "look", '{"a":', "1}"), *call(1, "wait")]
    events = encoded(output, EndReason.TOOL_CALLS)
    assert kinds(events)[5:] == [
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
    ]
    message, look, wait = output_of(events)
    assert message["type"] == "message"
    assert look == {
        "id": look["id"],
        "type": "function_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "look",
        "arguments": '{"a":1}',
    }
    assert (wait["call_id"], wait["name"], wait["arguments"]) == ("call_1", "wait", "")
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert added[1] == {**look, "status": "in_progress", "arguments": ""}
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["item_id"], event["output_index"], event["arguments"]) for event in done] == [
        (look["id"], 1, '{"a":1}'),
        (wait["id"], 2, ""),
    ]


def test_calls_whose_arguments_come_in_turns() -> None:
    first, second = call(0, "a", "1", "2"), call(1, "b", "3", "4")
    mixed = [event for pair in zip(first, second, strict=True) for event in pair]
    assert [item["arguments"] for item in output_of(encoded(mixed))] == ["12", "34"]


def test_a_refusal_is_a_part_of_the_message() -> None:
    events = encoded([ContentDelta("I"), RefusalDelta("No"), RefusalDelta(".")])
    assert kinds(events)[3:] == [
        "output_text.done",
        "content_part.done",
        "content_part.added",
        "refusal.delta",
        "refusal.delta",
        "refusal.done",
        "content_part.done",
        "output_item.done",
    ]
    (message,) = output_of(events)
    assert isinstance(message["content"], list)
    assert message["content"][1] == {"type": "refusal", "refusal": "No."}
    assert [event.get("content_index") for event in events[7:11]] == [1, 1, 1, 1]


def test_an_answer_cut_short() -> None:
    events = encoded([ContentDelta("Hel")], EndReason.LENGTH)
    assert output_of(events)[0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    broken = encoded([*call(0, "a", "{}"), *call(1, "b", '{"x')[:-1]], EndReason.LENGTH)
    assert [item["status"] for item in output_of(broken)] == ["completed", "incomplete"]
    assert kinds(broken)[-2:] == ["function_call_arguments.delta", "output_item.done"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    (message,) = output_of(encoded([]))
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    assert [item["type"] for item in output_of(encoded([ReasoningDelta("Hm")]))] == ["reasoning"]


def test_logprobs() -> None:
    tokens = (TokenLogprob(72, -0.5, ((72, -0.5), (0xC3, -1.5))), TokenLogprob(105, -0.25, ()))
    events = encoded([ContentDelta("Hi", tokens)], texts=TokenTexts(FakeTokenizer()))
    expected = [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "H", "logprob": -0.5, "bytes": [72]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": [195]},
            ],
        },
        {"token": "i", "logprob": -0.25, "bytes": [105], "top_logprobs": []},
    ]
    assert [event["logprobs"] for event in events if "logprobs" in event] == [expected, expected]
    (message,) = output_of(events)
    assert isinstance(message["content"], list) and message["content"][0]["logprobs"] == expected


def test_usage() -> None:
    assert usage_payload(Usage(10, 5, 4), 3) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
    }


text = st.text(max_size=6)
outputs = st.lists(
    st.one_of(
        st.builds(ContentDelta, text),
        st.builds(RefusalDelta, text),
        st.builds(ReasoningDelta, text),
        st.lists(text, max_size=3),
    ),
    max_size=8,
)


def flattened(output: list[object]) -> list[OutputEvent]:
    """Lists of texts are calls with these arguments."""
    events: list[OutputEvent] = []
    calls = 0
    for each in output:
        if isinstance(each, list):
            events += call(calls, f"f{calls}", *each)
            calls += 1
        elif isinstance(each, ContentDelta | RefusalDelta | ReasoningDelta):
            events.append(each)
    return events


@settings(max_examples=60, deadline=None)
@given(outputs)
def test_the_sdk_puts_together_what_the_response_says(output: list[object]) -> None:
    events = encoded(flattened(output))
    state: ResponseStreamState[object] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    arguments: dict[str, str] = {}
    texts: dict[str, str] = {}
    for event in events:
        for fired in state.handle_event(EVENTS[str(event["type"])].model_validate(event)):  # type: ignore[arg-type]
            if fired.type == "response.output_text.delta":
                texts[fired.item_id + str(fired.content_index)] = fired.snapshot
            elif fired.type == "response.function_call_arguments.delta":
                arguments[fired.item_id] = fired.snapshot
    final = state._completed_response
    assert final is not None
    for item in final.output:
        if item.type == "message":
            for index, part in enumerate(item.content):
                if part.type == "output_text" and part.text:
                    assert texts[item.id + str(index)] == part.text
        elif item.type == "function_call" and item.arguments:
            assert item.id is not None and arguments[item.id] == item.arguments


@settings(max_examples=60, deadline=None)
@given(outputs, st.integers(1, 3))
def test_however_the_texts_are_cut(output: list[object], size: int) -> None:
    whole = flattened(output)
    cut: list[OutputEvent] = []
    for event in whole:
        if isinstance(event, ContentDelta | RefusalDelta | ReasoningDelta) and event.text:
            pieces = [event.text[at : at + size] for at in range(0, len(event.text), size)]
            cut += [type(event)(piece) for piece in pieces]
        else:
            cut.append(event)

    def without_ids(events: list[JSON]) -> list[JSON]:
        return [{name: value for name, value in item.items() if name != "id"} for item in output_of(events)]

    assert without_ids(encoded(cut)) == without_ids(encoded(whole))
