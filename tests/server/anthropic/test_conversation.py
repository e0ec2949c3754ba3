"""Anthropic's messages as chat messages, block by block."""

from __future__ import annotations

import pytest

from chairlift.server.anthropic.signature import signature_of
from chairlift.server.anthropic.translate import Translation, translate
from chairlift.server.body import fit
from chairlift.server.errors import APIError, invalid
from chairlift.server.wire.chat import Message
from chairlift.server.wire.messages import MessagesRequest
from chairlift.server.wire.parameters import MESSAGES

Fields = dict[str, object]
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBO"}


def translated(*messages: Fields, **more: object) -> Translation:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), **more}
    return translate(fit(body, MessagesRequest, MESSAGES))


def chat(*messages: Fields, **more: object) -> list[Fields]:
    """The chat messages, of which each is one that the chat surface takes."""
    made = translated(*messages, **more).chat["messages"]
    assert isinstance(made, list)
    for message in made:
        Message.model_validate(message)
    return made


def user(*content: object) -> Fields:
    return {"role": "user", "content": list(content)}


def assistant(*content: object) -> Fields:
    return {"role": "assistant", "content": list(content)}


def text(words: str, **more: object) -> Fields:
    return {"type": "text", "text": words, **more}


def use(id: str, name: str = "look", **arguments: object) -> Fields:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(id: str, *content: object, **more: object) -> Fields:
    return {"type": "tool_result", "tool_use_id": id, "content": list(content), **more}


def test_texts_and_roles() -> None:
    assert chat(
        {"role": "user", "content": "Hi"},
        assistant(text("Hello"), text("there", citations=None)),
        user(text("How", cache_control={"type": "ephemeral"}), text("are you?")),
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": [text("Be kind.")]},
        system=[text("You are"), text("a lift.", cache_control={"type": "ephemeral"})],
    ) == [
        {"role": "system", "content": [text("You are"), text("a lift.")]},
        {"role": "user", "content": [text("Hi")]},
        {"role": "assistant", "content": [text("Hello"), text("there")]},
        {"role": "user", "content": [text("How"), text("are you?")]},
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "system", "content": [text("Be kind.")]},
    ]


@pytest.mark.parametrize("system", ["", [], None])
def test_no_system(system: object) -> None:
    assert chat({"role": "user", "content": "Hi"}, system=system) == [
        {"role": "user", "content": [text("Hi")]}
    ]


@pytest.mark.parametrize(
    "system",
    [
        [text("x-anthropic-billing-header: cc_version=2.1.197.1c0; cch=0a1b2;"), text("You help.")],
        [text("x-anthropic-billing-header: cc_version=2.1.197.1c0;\nYou help.")],
        "x-anthropic-billing-header: cc_version=2.1.197.fb7;\nYou help.",
    ],
)
def test_what_changes_with_every_session_is_no_part_of_the_prompt(system: object) -> None:
    assert chat(user(text("a")), system=system)[0] == {"role": "system", "content": [text("You help.")]}
    assert chat(user(text("x-anthropic-billing-header: a")))[0]["content"] == [
        text("x-anthropic-billing-header: a")
    ]


def test_turns_of_one_role_are_one() -> None:
    assert chat(
        user(text("a")),
        user(text("b")),
        assistant(text("c")),
        assistant({"type": "thinking", "thinking": "d", "signature": "s"}, use("1")),
    ) == [
        {"role": "user", "content": [text("a"), text("b")]},
        {
            "role": "assistant",
            "content": [text("c")],
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
            "reasoning_content": "d",
        },
    ]


def test_a_round_of_tools() -> None:
    assert chat(
        user(text("Look")),
        assistant(
            {"type": "thinking", "thinking": "I look", "signature": ""},
            {"type": "redacted_thinking", "data": "xyz"},
            text("Looking"),
            use("1", at="é"),
            {**use("2", "wait"), "caller": {"type": "direct"}},
            use("3"),
        ),
        user(
            text("Well?"),
            result("1", text("a"), text("b")),
            {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "3"},
        ),
    ) == [
        {"role": "user", "content": [text("Look")]},
        {
            "role": "assistant",
            "content": [text("Looking")],
            "reasoning_content": "I look",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}},
                {"id": "2", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
                {"id": "3", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "1", "name": "look"},
        {"role": "tool", "content": [text("Error:"), text("no")], "tool_call_id": "2", "name": "wait"},
        {"role": "tool", "content": [text("")], "tool_call_id": "3", "name": "look"},
        {"role": "user", "content": [text("Well?")]},
    ]


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ([user(result("1"))], "messages[0].content[0].tool_use_id", "no tool_use before it"),
        (
            [assistant(use("1")), user(text("a"), result("2"))],
            "messages[1].content[1].tool_use_id",
            "no tool_use before it has the id '2'",
        ),
        (
            [assistant(use("1")), user(result("1")), user(result("1"))],
            "messages[2].content[0].tool_use_id",
            "has its result",
        ),
        (
            [assistant(use("1")), user(result("1")), assistant(text("a")), user(result("1"))],
            "messages[3].content[0].tool_use_id",
            "not of the turn before",
        ),
        (
            [assistant(text("a"), use("1")), user(text("b"))],
            "messages[0].content[1]",
            "no tool_result follows",
        ),
        (
            [assistant(use("1"), use("2")), user(result("1")), assistant(text("a"))],
            "messages[0].content[1]",
            "the tool_use '2'",
        ),
        ([assistant(use("1"), use("1"))], "messages[0].content[1].id", "repeats '1'"),
    ],
)
def test_results_without_their_calls_and_calls_without_results(
    messages: list[Fields], param: str, said: str
) -> None:
    """As Anthropic's service has it."""
    with pytest.raises(APIError) as caught:
        chat(*messages)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message


def test_results_may_come_in_several_messages_and_around_the_systems() -> None:
    made = chat(
        assistant(use("1")),
        assistant(use("2")),
        {"role": "system", "content": "Wait."},
        user(result("2")),
        user(result("1"), text("Go on.")),
        assistant(use("1")),
        user(result("1")),
        assistant(use("3")),
    )
    assert [message["role"] for message in made] == [
        *("assistant", "system", "tool", "tool", "user", "assistant", "tool", "assistant")
    ]


def test_images_of_results_follow_as_the_users_and_keep_their_place() -> None:
    made = translated(
        assistant(use("1"), use("2")),
        user(
            result("1", {"type": "image", "source": PNG}, text("seen")),
            result("2", {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}),
            {"type": "image", "source": PNG, "cache_control": {"type": "ephemeral"}},
            text("What is it?"),
        ),
    )
    messages = made.chat["messages"]
    assert isinstance(messages, list)
    embedded = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    assert messages[1:] == [
        {"role": "tool", "content": [text("seen")], "tool_call_id": "1", "name": "look"},
        {"role": "tool", "content": "", "tool_call_id": "2", "name": "look"},
        {
            "role": "user",
            "content": [
                embedded,
                {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                embedded,
                text("What is it?"),
            ],
        },
    ]
    places = ["[0].content[0]", "[1].content[0]", "[2]", "[3]"]
    for at, place in enumerate(places):
        param = f"messages[3].content[{at}]"
        error = made.relocate(invalid(f"{param}: the image is damaged.", param, "invalid_image"))
        assert error.param == f"messages[1].content{place}"
        assert error.message == f"messages[1].content{place}: the image is damaged."


def test_documents_and_search_results_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Once."}
    blocks = {"type": "content", "content": [text("Twice."), {"type": "image", "source": PNG}]}
    found = {
        "type": "search_result",
        "source": "http://x",
        "title": "Found",
        "content": [text("a"), text("b")],
        "citations": {"enabled": False},
    }
    assert chat(
        user(
            {"type": "document", "source": plain, "title": "Tale", "context": "Old", "citations": None},
            {"type": "document", "source": blocks},
            {"type": "document", "source": {"type": "content", "content": "Thrice."}},
            found,
        )
    )[0]["content"] == [
        text("Tale"),
        text("Old"),
        text("Once."),
        text("Twice."),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
        text("Thrice."),
        text("Found\nhttp://x\na\nb"),
    ]
    assert chat(assistant(use("1")), user(result("1", found, {"type": "tool_reference", "tool_name": "t"})))[
        1
    ]["content"] == [text("Found\nhttp://x\na\nb"), text("t")]


def test_thinking_that_was_not_shown_comes_back() -> None:
    sealed = {"type": "thinking", "thinking": "", "signature": signature_of("Hm.", omitted=True)}
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQB"}
    assert chat(user(text("a")), assistant(sealed, text("b")))[1]["reasoning_content"] == "Hm."
    assert "reasoning_content" not in chat(user(text("a")), assistant(foreign, text("b")))[1]


def thought(words: str) -> Fields:
    return {"type": "thinking", "thinking": words, "signature": "s"}


@pytest.mark.parametrize(
    ("keep", "kept", "cleared"),
    [
        ({"keep": "all"}, ["1", "2", "2b", "3"], []),
        ({"keep": {"type": "all"}}, ["1", "2", "2b", "3"], []),
        ({}, ["3"], ["1", "2\n2b"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["2", "2b", "3"], ["1"]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, ["1", "2", "2b", "3"], []),
    ],
)
def test_old_thinking_is_cleared(keep: Fields, kept: list[str], cleared: list[str]) -> None:
    made = translated(
        user(text("a")),
        assistant(thought("1"), text("A")),
        user(text("b")),
        assistant(thought("2"), use("x")),
        user(result("x", text("r"))),
        assistant(thought("2b"), text("B")),
        user(text("plain")),
        assistant(text("no thought")),
        user(text("c")),
        assistant(thought("3"), use("y")),
        user(result("y", text("r"))),
        context_management={"edits": [{"type": "clear_thinking_20251015", **keep}]},
    )
    messages = made.chat["messages"]
    assert isinstance(messages, list)
    assert [m["reasoning_content"] for m in messages if "reasoning_content" in m] == kept
    assert made.cleared == cleared


REFUSED: list[tuple[Fields, str]] = [
    (assistant({"type": "image", "source": PNG}), "messages[0].content[0]"),
    (assistant(text("a"), result("1")), "messages[0].content[1]"),
    (user(use("1")), "messages[0].content[0]"),
    (user(thought("a")), "messages[0].content[0]"),
    (user({"type": "redacted_thinking", "data": "a"}), "messages[0].content[0]"),
    ({"role": "system", "content": [{"type": "image", "source": PNG}]}, "messages[0].content[0]"),
    ({"role": "system", "content": [result("1")]}, "messages[0].content[0]"),
    ({"role": "system", "content": []}, "messages[0].content"),
    (user(), "messages[0].content"),
    (user({"type": "server_tool_use", "id": "1"}), "messages[0].content[0]"),
    (user({"type": "container_upload", "file_id": "1"}), "messages[0].content[0]"),
    (user({"type": "image", "source": {"type": "file", "file_id": "1"}}), "messages[0].content[0].source"),
    (user({"type": "image", "source": {**PNG, "media_type": "image/svg"}}), "media_type"),
    (
        user({"type": "image", "source": PNG, "transformations": {"oversized_image": "error"}}),
        "messages[0].content[0].transformations.oversized_image",
    ),
    (
        user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}),
        "messages[0].content[0].source",
    ),
    (
        user(
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": ""},
                "citations": {"enabled": True},
            }
        ),
        "messages[0].content[0].citations.enabled",
    ),
    (user(result("1", {"type": "thinking", "thinking": "a"})), "messages[0].content[0].content[0]"),
    (assistant({**use("1"), "caller": {"type": "code_execution_20250825"}}), "caller.type"),
]


@pytest.mark.parametrize(("message", "place"), REFUSED)
def test_blocks_that_are_refused_by_name(message: Fields, place: str) -> None:
    with pytest.raises(APIError) as refused:
        translated(message)
    assert refused.value.status == 400
    assert place in str(refused.value.param)
    assert place in refused.value.message


def test_an_empty_answer_may_come_back() -> None:
    assert chat(user(text("a")), assistant(), user(text("b")))[1] == {"role": "assistant", "content": ""}


def test_places_that_nobody_knows_stay_as_they_are() -> None:
    made = translated(user(text("a")))
    for param in (None, "model", "elsewhere[3].x"):
        error = invalid("It is wrong.", param)
        assert (made.relocate(error).param, made.relocate(error).message) == (param, "It is wrong.")


def test_a_refusal_keeps_all_but_its_place() -> None:
    made = translated(user(text("a")))
    error = APIError(429, "stop is full.", kind="k", param="stop", code="c", headers={"Retry-After": "3"})
    moved = made.relocate(error)
    assert (moved.status, moved.message, moved.kind) == (429, "stop_sequences is full.", "k")
    assert (moved.param, moved.code, moved.headers) == ("stop_sequences", "c", {"Retry-After": "3"})
