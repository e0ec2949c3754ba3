"""Calls and results in a chat's history, as OpenAI's service has them."""

from __future__ import annotations

import pytest

from chairlift.server.errors import APIError
from chairlift.server.tool_history import check_tool_history
from chairlift.server.wire.chat import Message
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, error_of, lift

USER: JSON = {"role": "user", "content": "a"}


def calls(*ids: str | None) -> JSON:
    function = {"name": "f", "arguments": "{oops"}
    made = [{"type": "function", "function": function, **({} if id is None else {"id": id})} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id: str | None = None) -> JSON:
    return {"role": "tool", "content": "x", **({} if id is None else {"tool_call_id": id})}


def check(*messages: JSON) -> None:
    check_tool_history([Message.model_validate(message) for message in messages])


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ([result("1")], "messages[0].role", "has to follow"),
        ([USER, result()], "messages[1].role", "has to follow"),
        ([calls("1"), result("1"), USER, result("1")], "messages[3].role", "has to follow"),
        ([calls("1"), result("2")], "messages[1].tool_call_id", "'2' is no call"),
        ([calls("1"), result("1"), result("1")], "messages[2].tool_call_id", "'1' is no call"),
        ([calls("1"), result()], "messages[1].tool_call_id", "Missing"),
        ([calls(None), result(), result()], "messages[2].tool_call_id", "more results than calls"),
        ([calls("1", "2"), result("2"), USER], "messages[2]", "'1'"),
        ([calls("1"), USER], "messages[1]", "'1'"),
        ([calls(None), USER], "messages[1]", "a call"),
        ([calls("1"), calls("2"), result("2")], "messages[1]", "'1'"),
        ([calls("1", "1")], "messages[0].tool_calls[1].id", "repeats"),
    ],
)
def test_what_is_refused(messages: list[JSON], param: str, said: str) -> None:
    with pytest.raises(APIError) as caught:
        check(*messages)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert said in caught.value.message


@pytest.mark.parametrize(
    "messages",
    [
        [USER, calls("1", "2"), result("2"), result("1"), USER],
        [calls("1"), result("1"), calls("1"), result("1"), USER],
        [calls(None, None), result("x"), result(), USER],
        [calls("1", None), result("7"), result("1")],
        [USER, calls("1")],
        [calls("1", "2"), result("1")],
        [{"role": "assistant", "content": "a", "tool_calls": []}, USER],
    ],
)
def test_what_passes(messages: list[JSON]) -> None:
    """A conversation may end with calls: they have their results still to come."""
    check(*messages)


async def test_over_http() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        error = error_of(await server.chat(messages=[USER, result("1")]), 400)
        assert (error["param"], error["code"]) == ("messages[1].role", "invalid_value")
        history = [USER, calls("1"), result("1"), USER]
        assert (await server.chat(messages=history)).status_code == 200
