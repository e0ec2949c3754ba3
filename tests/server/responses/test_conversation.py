"""Items as messages of a chat: what joins, what stands alone, and whose fault is whose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.errors import APIError
from chairlift.server.responses.conversation import ConversationBuilder
from chairlift.server.responses.items import payload
from chairlift.server.sealing import SEALED, seal
from chairlift.server.wire.responses import ITEMS
from tests.server.harness import JSON
from tests.server.responses.asking import checked_item


def conversation(*items: JSON, instructions: str | None = None) -> list[JSON]:
    builder = ConversationBuilder(instructions)
    builder.add(ITEMS.validate_python(list(items)), [f"input[{index}]" for index in range(len(items))])
    return builder.finish().messages


def user(text: str) -> JSON:
    return {"role": "user", "content": text}


def said(*texts: str) -> JSON:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text} for text in texts]}


def call(id: str, **more: object) -> JSON:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}", **more}


def output(id: str, content: object = "1") -> JSON:
    return {"type": "function_call_output", "call_id": id, "output": content}


def thought(text: str) -> JSON:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(id: str, name: str = "f", arguments: str = "{}") -> JSON:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_answer_is_one_message() -> None:
    assert conversation(
        user("a"), thought("t"), said("x", "y"), call("1"), call("2"), output("1"), output("2"), user("b")
    ) == [
        user("a"),
        {
            "role": "assistant",
            "content": "xy",
            "reasoning_content": "t",
            "tool_calls": [called("1"), called("2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "1"},
        {"role": "tool", "tool_call_id": "2", "content": "1"},
        user("b"),
    ]


def test_where_another_answer_begins() -> None:
    assistant: JSON = {"role": "assistant"}
    first: JSON = {**assistant, "content": "", "tool_calls": [called("1")]}
    # Text after text, text after calls, and thinking after anything.
    assert conversation(said("x"), said("y")) == [
        {**assistant, "content": "x"},
        {**assistant, "content": "y"},
    ]
    assert conversation(call("1"), said("y")) == [first, {**assistant, "content": "y"}]
    assert conversation(thought("s"), call("1"), thought("t"), call("2")) == [
        {**first, "reasoning_content": "s"},
        {**first, "reasoning_content": "t", "tool_calls": [called("2")]},
    ]
    assert conversation(call("1"), output("1"), call("2"), output("2"))[2]["tool_calls"] == [called("2")]


@pytest.mark.parametrize(
    "items",
    [
        [call("1"), user("a")],
        [call("1"), said("x"), user("a"), said("y")],
        [call("2"), call("1"), output("2")],
        [call("1"), user("a"), call("1"), output("1")],
    ],
)
def test_calls_without_their_outputs_are_refused(items: list[JSON]) -> None:
    with pytest.raises(APIError) as caught:
        conversation(*items)
    place = [f"input[{at}]" for at, item in enumerate(items) if item == call("1")][-1]
    assert (caught.value.status, caught.value.param) == (400, place)
    assert "function call 1" in caught.value.message


def test_outputs_may_come_late_and_those_of_the_end_are_still_to_come() -> None:
    late = conversation(call("1"), user("a"), output("1"))
    assert [message["role"] for message in late] == ["assistant", "user", "tool"]
    assert len(conversation(user("a"), call("1"), said("x"), call("2"))) == 3


def test_thinking_alone_is_not_lost() -> None:
    assert conversation(thought("t"), user("a")) == [
        {"role": "assistant", "content": "", "reasoning_content": "t"},
        user("a"),
    ]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "full"}], "encrypted_content": "x"}, "full"),
        ({"content": [], "encrypted_content": seal("sealed")}, "sealed"),
        ({"content": None, "encrypted_content": seal("sealed")}, "sealed"),
        ({"encrypted_content": "gAAAAABo"}, "short"),
        ({"encrypted_content": SEALED + "?"}, "short"),
        ({}, "short"),
    ],
)
def test_what_can_be_read_of_thinking(more: JSON, text: str) -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], **more}
    assert conversation(item, said("x"))[0]["reasoning_content"] == text


def test_thinking_that_cannot_be_read_is_left_out() -> None:
    sealed: JSON = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    assert conversation(user("a"), sealed, said("x"))[1] == {"role": "assistant", "content": "x"}
    assert conversation(user("a"), sealed) == [user("a")]


def test_instructions_and_roles() -> None:
    items = [{"role": role, "content": "x"} for role in ("system", "developer", "user")]
    assert conversation(*items, instructions="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        *items,
    ]
    assert conversation(instructions="") == [{"role": "system", "content": ""}]


def test_parts() -> None:
    image = {"type": "input_image", "image_url": "data:,", "detail": "low"}
    text = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert conversation({"role": "user", "content": [text, image]}, call("1"), output("1", [image])) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
            ],
        },
        {"role": "assistant", "content": "", "tool_calls": [called("1")]},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}],
        },
    ]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert conversation(refusal) == [{"role": "assistant", "content": "No."}]


def test_calls_of_other_servers() -> None:
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a"\n'}
    done = {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}
    assert conversation(custom, done, call("2", namespace="agents"))[:2] == [
        {"role": "assistant", "content": "", "tool_calls": [called("1", "patch", '{"input": "a\\"\\n"}')]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    assert conversation(call("2", namespace="agents"))[0]["tool_calls"] == [called("2", "agents.f")]


def test_an_output_needs_its_call_before_it() -> None:
    for items, param in (
        ([output("1"), call("1")], "input[0].call_id"),
        ([call("1"), output("2")], "input[1].call_id"),
        ([call("1", status="incomplete"), output("1")], "input[1].call_id"),
        ([call("1"), output("1"), output("1")], "input[2].call_id"),
    ):
        with pytest.raises(APIError) as error:
            conversation(*items)
        assert error.value.param == param
    again = conversation(call("1"), output("1"), call("1"), output("1"))
    assert [message["role"] for message in again] == ["assistant", "tool"] * 2


text = st.text(max_size=5)
items = st.lists(
    st.one_of(
        st.builds(user, text),
        st.builds(said, text, text),
        st.builds(thought, text),
        st.integers(0, 3).map(lambda number: call(str(number))),
        st.integers(0, 3).map(lambda number: output(str(number))),
    ),
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(items)
def test_as_they_are_kept_they_say_the_same(given_items: list[JSON]) -> None:
    kept = [payload(item) for item in ITEMS.validate_python(given_items)]
    for item in kept:
        checked_item(item)
    assert [payload(item) for item in ITEMS.validate_python(kept)] == kept
    try:
        expected = conversation(*given_items)
    except APIError:
        return

    def plain(messages: list[JSON]) -> list[JSON]:
        return [{**message, "content": _text(message["content"])} for message in messages]

    assert plain(conversation(*kept)) == plain(expected)


def _text(content: object) -> object:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content
