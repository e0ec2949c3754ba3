"""Parameters of Anthropic's as chat has them."""

from __future__ import annotations

import pytest

from chairlift.server.anthropic.translate import translate
from chairlift.server.body import fit
from chairlift.server.errors import APIError, invalid
from chairlift.server.wire.messages import MessagesRequest
from chairlift.server.wire.parameters import MESSAGES

Fields = dict[str, object]
SCHEMA: Fields = {"type": "object", "properties": {"at": {"type": "string", "pattern": "^a"}}}
LOOK: Fields = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
SEARCH: Fields = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def asked(**more: object) -> Fields:
    """The chat request without its messages, model and the default of thinking."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **more}
    chat = translate(fit(body, MessagesRequest, MESSAGES)).chat
    assert chat.pop("model") == "m" and chat.pop("max_tokens") == 9 and chat.pop("messages")
    if "thinking" not in more:
        assert chat.pop("chat_template_kwargs") == {"enable_thinking": False}
    return chat


def function(name: str, **more: object) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def test_sampling() -> None:
    assert asked() == {}
    assert asked(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["a"], stream=True) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["a"],
        "stream": True,
    }
    assert asked(stop_sequences=[], stream=False, top_k=None) == {"stream": False}


def test_tools() -> None:
    assert asked(tools=[]) == {}
    more = {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}, "defer_loading": True}
    assert asked(tools=[LOOK, {"name": "wait", "input_schema": SCHEMA, **more}]) == {
        "tools": [function("look", description="Looks."), function("wait", strict=True)]
    }
    shown = asked(tools=[{**LOOK, "input_examples": [{"at": "ä"}, {"at": "b"}]}])["tools"]
    assert shown == [
        function("look", description='Looks.\n\nExamples of its input:\n{"at": "ä"}\n{"at": "b"}')
    ]


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "look"},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
    ],
)
def test_choice_of_tools(choice: Fields, chat: Fields) -> None:
    assert asked(tools=[LOOK], tool_choice=choice) == {
        "tools": [function("look", description="Looks.")],
        **chat,
    }


def test_a_choice_of_no_tool_needs_none() -> None:
    for kind in ("auto", "none"):
        assert asked(tool_choice={"type": kind}) == {}


def test_tools_of_the_server_are_left_out_beside_others() -> None:
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [SEARCH, {"type": "tool_search_tool_regex_20251119", "name": "s"}, LOOK],
    }
    made = translate(fit(body, MessagesRequest, MESSAGES))
    assert made.chat["tools"] == [function("look", description="Looks.")]
    error = made.relocate(
        invalid("tools[0].function.parameters.type is wrong.", "tools[0].function.parameters.type")
    )
    assert error.param == "tools[2].input_schema.type"
    assert error.message == "tools[2].input_schema.type is wrong."


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"tools": [SEARCH]}, "tools[0]"),
        ({"tools": [LOOK, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tools[1]"),
        ({"tools": [LOOK, {"type": "text_editor_20250728", "name": "e"}]}, "tools[1]"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "look"}}, "tool_choice"),
        (
            {"tools": [{**LOOK, "allowed_callers": ["code_execution_20250825"]}]},
            "tools[0].allowed_callers[0]",
        ),
    ],
)
def test_tools_that_are_refused(more: Fields, place: str) -> None:
    with pytest.raises(APIError) as refused:
        asked(**more)
    assert refused.value.status == 400
    assert str(refused.value.param).startswith(place)
    assert place in refused.value.message


def test_thinking() -> None:
    assert asked(thinking={"type": "adaptive", "display": "omitted"}) == {}
    assert asked(thinking={"type": "disabled"}) == {"chat_template_kwargs": {"enable_thinking": False}}
    assert asked(thinking={"type": "enabled", "budget_tokens": 1024}) == {
        "enable_thinking": True,
        "thinking_token_budget": 1024,
    }


def test_output() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    made = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
        }
    }
    assert asked(output_format=form) == made
    assert asked(output_config={"format": form}) == made
    assert asked(output_config={"format": form}, output_format=form) == made
    assert asked(output_config={}) == {}
    for effort in ("low", "medium", "high", "xhigh", "max"):
        assert asked(output_config={"effort": effort}) == {"reasoning_effort": effort}
