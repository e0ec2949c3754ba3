"""The scripted server says what conversations tell it, also under the schema of a strict tool."""

from __future__ import annotations

import json

import pytest

from tests.clients.scripted import Scripted, answer
from tests.clients.template import TEMPLATE
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner
from tests.server.harness import MODEL, lift

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>'
ASKED = {"role": "user", "content": f"Add. @@{CALL}@@It is {{result}}.@@"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("Hi", "ready"),
        ("An address: a@@b", "ready"),
        ("@@one@@", "one"),
        ("@@one@@two@@", "one"),
        ("@@one@@{result}!@@<|im_end|>\n<tool_response>\n4\n2\n</tool_response>", "4\n2!"),
        ("@@one@@{result}!@@<tool_response>\na\n</tool_response><tool_response>\nb\n</tool_response>", "b!"),
        ("<tool_response>\nold\n</tool_response>@@one@@two@@", "one"),
        ("@@one@@<|im_end|>\n@@two@@<|im_end|>", "two"),
        ("@@<|im_end|>\n@@two@@<|im_end|>", "two"),
    ],
)
def test_answers(prompt: str, said: str) -> None:
    assert answer(prompt) == said


@pytest.mark.parametrize("strict", [False, True])
async def test_a_tools_round_trip(strict: bool) -> None:
    function = {"name": "add", "parameters": PARAMETERS, "strict": strict}
    tools = [{"type": "function", "function": function}]
    async with lift(FakeRunner(Scripted()), tokenizer=FakeTokenizer(jinja=TEMPLATE)) as server:
        called = (await server.chat(messages=[ASKED], tools=tools)).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        (call,) = called["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 19, "b": 23}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        told = await server.chat(messages=[ASKED, called["message"], result], tools=tools)
        assert told.json()["choices"][0]["message"]["content"] == "It is 42."

        body = {"model": MODEL, "input": ASKED["content"], "tools": [{"type": "function", **function}]}
        first = (await server.client.post("/v1/responses", json=body)).json()
        (call,) = first["output"]
        output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "42"}]
        more = {**body, "input": output, "previous_response_id": first["id"]}
        second = (await server.client.post("/v1/responses", json=more)).json()
        assert second["output"][0]["content"][0]["text"] == "It is 42."
