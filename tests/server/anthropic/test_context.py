"""Edits of the context: what is taken out, when, and what is told of it."""

from __future__ import annotations

import pytest

from chairlift.server.anthropic.context import CLEARED
from chairlift.server.anthropic.translate import Translation, translate
from chairlift.server.body import fit
from chairlift.server.wire.messages import ClearToolUses, MessagesRequest
from chairlift.server.wire.parameters import MESSAGES
from tests.fakes import FakeRunner, answering
from tests.server.anthropic.asking import COUNT, ask, events_of
from tests.server.harness import lift

Fields = dict[str, object]
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
CLEAR = "clear_tool_uses_20250919"


def call(id: str, name: str) -> Fields:
    use = {"type": "tool_use", "id": id, "name": name, "input": {"at": id}}
    return {"role": "assistant", "content": [use]}


def result(id: str, *content: object) -> Fields:
    block = {"type": "tool_result", "tool_use_id": id, "content": list(content)}
    return {"role": "user", "content": [block]}


def text(words: str) -> Fields:
    return {"type": "text", "text": words}


MESSAGES_OF_TOOLS: list[Fields] = [
    {"role": "user", "content": "Go"},
    call("1", "look"),
    result("1", text("first " * 20), {"type": "image", "source": PNG}),
    call("2", "wait"),
    result("2", text("second " * 20)),
    call("3", "look"),
    result("3", text("third " * 20), {"type": "image", "source": PNG}),
]


def cleared(**edit: object) -> tuple[list[Fields], Translation]:
    body: Fields = {"model": "m", "max_tokens": 9, "messages": MESSAGES_OF_TOOLS}
    wire = fit(body, MessagesRequest, MESSAGES)
    made = translate(wire, ClearToolUses.model_validate({"type": CLEAR, **edit}))
    messages = made.chat["messages"]
    assert isinstance(messages, list)
    return messages, made


@pytest.mark.parametrize(
    ("edit", "gone"),
    [
        ({}, []),
        ({"keep": {"type": "tool_uses", "value": 1}}, ["1", "2"]),
        ({"keep": {"type": "tool_uses", "value": 0}}, ["1", "2", "3"]),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["wait", "x"]}, ["1"]),
        ({"keep": {"type": "tool_uses", "value": 9}}, []),
    ],
)
def test_old_results_go_with_their_images(edit: Fields, gone: list[str]) -> None:
    messages, made = cleared(**edit)
    assert made.results == 3 and made.cleared_results == len(gone)
    results = {str(m["tool_call_id"]): m["content"] for m in messages if m["role"] == "tool"}
    assert [id for id, content in results.items() if content == [text(CLEARED)]] == gone
    assert [len(m["content"]) for m in messages if m["role"] == "user"] == [  # type: ignore[arg-type]
        1,
        *(1 for id in ("1", "3") if id not in gone),
    ]
    arguments = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ())]  # type: ignore[attr-defined]
    assert arguments == ['{"at": "1"}', '{"at": "2"}', '{"at": "3"}']


@pytest.mark.parametrize(
    ("inputs", "arguments"),
    [
        (True, ["{}", "{}", '{"at": "3"}']),
        (["wait"], ['{"at": "1"}', "{}", '{"at": "3"}']),
        ([], ['{"at": "1"}', '{"at": "2"}', '{"at": "3"}']),
        (None, ['{"at": "1"}', '{"at": "2"}', '{"at": "3"}']),
    ],
)
def test_arguments_go_where_asked(inputs: object, arguments: list[str]) -> None:
    messages, _ = cleared(keep={"type": "tool_uses", "value": 1}, clear_tool_inputs=inputs)
    calls = [c for m in messages for c in m.get("tool_calls", ())]  # type: ignore[attr-defined]
    assert [c["function"]["arguments"] for c in calls] == arguments


TEXT_ONLY = [
    {"role": "user", "content": "Go"},
    call("1", "look"),
    result("1", text("first " * 20)),
    call("2", "look"),
    result("2", text("second " * 20)),
]


@pytest.mark.parametrize(
    ("edit", "applies"),
    [
        ({"trigger": {"type": "tool_uses", "value": 1}}, True),
        ({"trigger": {"type": "tool_uses", "value": 2}}, False),
        ({"trigger": {"type": "input_tokens", "value": 200}}, True),
        ({"trigger": {"type": "input_tokens", "value": 2000}}, False),
        ({}, False),
        (
            {
                "trigger": {"type": "tool_uses", "value": 0},
                "clear_at_least": {"type": "input_tokens", "value": 95},
            },
            True,
        ),
        (
            {
                "trigger": {"type": "tool_uses", "value": 0},
                "clear_at_least": {"type": "input_tokens", "value": 96},
            },
            False,
        ),
    ],
)
async def test_when_it_is_due_and_what_is_told(edit: Fields, applies: bool) -> None:
    """120 characters of a result are a token each here, and 25 stand in their place."""
    management = {"edits": [{"type": CLEAR, "keep": {"type": "tool_uses", "value": 1}, **edit}]}
    told = {"type": CLEAR, "cleared_tool_uses": 1, "cleared_input_tokens": 95}
    async with lift(FakeRunner(answering("a"))) as server:
        plain = (await ask(server, messages=TEXT_ONLY)).json()["usage"]["input_tokens"]
        reply = (await ask(server, messages=TEXT_ONLY, context_management=management)).json()
        assert reply["context_management"] == {"applied_edits": [told] if applies else []}
        assert reply["usage"]["input_tokens"] == plain - (95 if applies else 0)
        events = events_of(await ask(server, messages=TEXT_ONLY, context_management=management, stream=True))
        assert events[-2]["context_management"] == reply["context_management"]
        count = (await ask(server, COUNT, messages=TEXT_ONLY, context_management=management)).json()
        assert count == {
            "input_tokens": reply["usage"]["input_tokens"],
            "context_management": {"original_input_tokens": plain},
        }


async def test_cleared_thinking_is_told_of() -> None:
    def answer(thinking: str) -> Fields:
        block = {"type": "thinking", "thinking": thinking, "signature": "s"}
        return {"role": "assistant", "content": [block, text("ok")]}

    messages = [
        {"role": "user", "content": "a"},
        answer("twelve chars"),
        {"role": "user", "content": "b"},
        answer("kept"),
        {"role": "user", "content": "c"},
    ]
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    async with lift(FakeRunner(answering("a"))) as server:
        reply = (await ask(server, messages=messages, context_management=edits)).json()
    assert reply["context_management"] == {
        "applied_edits": [
            {"type": "clear_thinking_20251015", "cleared_thinking_turns": 1, "cleared_input_tokens": 12}
        ]
    }
