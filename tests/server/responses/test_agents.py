"""What agents do: call tools and send back what came of it, by id or in full; Codex's requests among them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from openai.types.responses import FunctionToolParam, ResponseInputItemParam

from tests.fake_tokenizer import EOS
from tests.fakes import FakeRow, FakeRunner
from tests.server.harness import JSON, MODEL, Lift, error_of, lift
from tests.server.responses.asking import Recorder, checked, respond, response_of, stream_of
from tests.server.test_sdk import client_of
from tests.server.test_tools import QWEN

LOOK: FunctionToolParam = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "strict": False,
}
WAIT: JSON = {"type": "function", "name": "wait"}
CALLS = (
    "<think>\nhm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)


@dataclass
class Script:
    """Answers, one after the other."""

    tokenizer: Recorder
    answers: list[str]
    rows: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, row: FakeRow) -> int:
        if row.new.sampling.max_tokens == 2:  # the engine's own test at the start
            return EOS
        if row.new.row not in self.rows:
            self.rows[row.new.row] = [*self.tokenizer.marked(self.answers.pop(0)), EOS]
        tokens = self.rows[row.new.row]
        return tokens[min(row.drawn, len(tokens) - 1)]


@asynccontextmanager
async def saying(*answers: str, context_length: int = 4096) -> AsyncIterator[tuple[Lift, Recorder]]:
    tokenizer = Recorder(template=QWEN)
    runner = FakeRunner(Script(tokenizer, list(answers)))
    async with lift(runner, tokenizer=tokenizer, context_length=context_length) as server:
        yield server, tokenizer


def kinds(response: JSON) -> list[str]:
    output = response["output"]
    assert isinstance(output, list)
    return [item["type"] for item in output]


def outputs(response: JSON) -> list[JSON]:
    """What came of each call of a response."""
    output = response["output"]
    assert isinstance(output, list)
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"{item['name']} done"}
        for item in output
        if item["type"] == "function_call"
    ]


async def test_thinking_text_and_calls() -> None:
    async with saying(CALLS, CALLS) as (server, tokenizer):
        whole = await response_of(server, tools=[LOOK, WAIT])
        events = await stream_of(server, tools=[LOOK, WAIT])
    assert kinds(whole) == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, look, wait = whole["output"]  # type: ignore[misc]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I look."
    assert (look["name"], json.loads(look["arguments"])) == ("look", {"at": "sea"})
    assert (wait["name"], wait["arguments"]) == ("wait", "{}")
    assert look["call_id"] != wait["call_id"] and look["id"] != look["call_id"]
    assert whole["status"] == "completed"
    usage = whole["usage"]
    assert isinstance(usage, dict)
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>\nhm\n</think>")}
    offered = tokenizer.template_arguments[0]["tools"]
    assert isinstance(offered, list)
    assert [tool["function"]["name"] for tool in offered] == ["look", "wait"]
    assert offered[0]["function"]["parameters"] == LOOK["parameters"]
    assert whole["tools"] == [
        {**LOOK, "strict": False},
        {"type": "function", "name": "wait", "description": None, "parameters": None, "strict": None},
    ]
    streamed = events[-1]["response"]
    assert isinstance(streamed, dict) and kinds(streamed) == kinds(whole)
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(map(str, pieces)).removesuffix("{}")) == {"at": "sea"}


EXPECTED: list[JSON] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "hm"},
    {"role": "tool", "content": "look done"},
    {"role": "tool", "content": "wait done"},
]


def shown(conversation: list[JSON]) -> list[JSON]:
    """Without what ids there are, which are the same in calls and outputs."""
    calls = [call for message in conversation for call in message.get("tool_calls", [])]  # type: ignore[attr-defined]
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": {"at": "sea"}},
        {"name": "wait", "arguments": {}},
    ]
    ids = [message["tool_call_id"] for message in conversation if message["role"] == "tool"]
    assert ids == [call["id"] for call in calls]
    left_out = ("tool_calls", "tool_call_id")
    return [
        {name: value for name, value in message.items() if name not in left_out} for message in conversation
    ]


async def test_what_came_of_calls_by_id() -> None:
    async with saying(CALLS, "The sea is blue.") as (server, tokenizer):
        first = await response_of(server, tools=[LOOK, WAIT])
        second = await response_of(
            server, tools=[LOOK, WAIT], previous_response_id=first["id"], input=outputs(first)
        )
        assert second["output"][0]["content"][0]["text"] == "The sea is blue."  # type: ignore[index]
    assert shown(tokenizer.conversations[-1]) == EXPECTED


async def test_what_came_of_calls_in_full() -> None:
    async with saying(CALLS, "The sea is blue.") as (server, tokenizer):
        first = await response_of(server, tools=[LOOK, WAIT], store=False)
        history: list[object] = [{"role": "user", "content": "Hi"}, *first["output"]]  # type: ignore[misc]
        await response_of(server, tools=[LOOK, WAIT], store=False, input=[*history, *outputs(first)])
    assert shown(tokenizer.conversations[-1]) == EXPECTED


async def test_reasoning_comes_back_sealed() -> None:
    """As from clients that send back nothing of it but what they cannot read."""
    async with saying(CALLS, "The sea is blue.") as (server, tokenizer):
        first = await response_of(
            server, tools=[LOOK, WAIT], store=False, include=["reasoning.encrypted_content"]
        )
        reasoning, *others = first["output"]  # type: ignore[misc]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
        history: list[object] = [{"role": "user", "content": "Hi"}, sealed, *others]
        await response_of(server, tools=[LOOK, WAIT], input=[*history, *outputs(first)])
    assert shown(tokenizer.conversations[-1]) == EXPECTED


async def test_reasoning_as_a_summary() -> None:
    async with saying(CALLS, CALLS, "Well.") as (server, tokenizer):
        first = await response_of(server, reasoning={"summary": "auto"}, tools=[LOOK, WAIT])
        events = await stream_of(server, reasoning={"generate_summary": "detailed"}, tools=[LOOK, WAIT])
        assert first["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]  # type: ignore[index]
        assert first["reasoning"] == {"effort": None, "summary": "auto"}
        assert "response.reasoning_summary_text.delta" in {event["type"] for event in events}
        await response_of(server, tools=[LOOK, WAIT], previous_response_id=first["id"], input=outputs(first))
    assert shown(tokenizer.conversations[-1]) == EXPECTED


async def test_a_call_cut_short_is_not_gone_on_with() -> None:
    wait = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>\n'
    short = wait + '<tool_call>\n{"name": "look", "arguments": {"at": "the se'
    async with saying(short + 'a"}}\n</tool_call>', "Well.") as (server, tokenizer):
        first = await response_of(server, tools=[LOOK, WAIT], max_output_tokens=len(short))
        assert first["status"] == "incomplete"
        whole, broken = first["output"]  # type: ignore[misc]
        assert (whole["status"], broken["status"]) == ("completed", "incomplete")
        assert broken["arguments"].startswith('{"at": "the')
        await response_of(
            server, tools=[LOOK, WAIT], previous_response_id=first["id"], input=outputs(first)[:1]
        )
    (_, answer, output) = tokenizer.conversations[-1]
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["wait"]  # type: ignore[attr-defined]
    assert output["role"] == "tool"


async def test_what_may_be_called() -> None:
    async with saying("a", "b", "c") as (server, tokenizer):
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
        response = await response_of(server, tools=[LOOK, WAIT], tool_choice=allowed)
        assert response["tool_choice"] == allowed
        response = await response_of(server, tools=[LOOK], tool_choice="none")
        assert response["tool_choice"] == "none"
        assert not tokenizer.template_arguments[-1]["tools"]
        only_hosted = {**allowed, "tools": [{"type": "web_search"}]}
        await response_of(server, tools=[LOOK, {"type": "web_search"}], tool_choice=only_hosted)
        assert not tokenizer.template_arguments[-1]["tools"]
        refused = {**only_hosted, "mode": "required"}
        error = error_of(await respond(server, tools=[LOOK], tool_choice=refused), 400)
        assert error["param"] == "tool_choice.tools"
        twice = error_of(await respond(server, tools=[{"type": "web_search"}, LOOK, LOOK]), 400)
        assert twice["param"] == "tools[2].name"
        scalar = {**LOOK, "parameters": {"type": "string"}}
        error = error_of(await respond(server, tools=[{"type": "mcp"}, scalar]), 400)
        assert error["param"] == "tools[1].parameters"
        unreachable = await response_of_tools(server, [{**WAIT, "allowed_callers": ["programmatic"]}])
        assert unreachable == []


async def response_of_tools(server: Lift, tools: list[JSON]) -> object:
    server.runner.draw = lambda row: EOS
    return (await response_of(server, tools=tools))["tools"]


def codex(turn: list[JSON]) -> JSON:
    """A request of the form and the size that Codex sends."""
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs a shell command and returns its output.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    spawn = {"type": "function", "name": "spawn", "strict": False, "parameters": {"type": "object"}}
    context = "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>"
    texts = [
        ("developer", "You are a coding agent. " * 1700),
        ("developer", "<skills>"),
        ("user", context),
        ("user", "List the files."),
    ]
    history: list[JSON] = [
        {
            "type": "message",
            "id": f"msg_{number}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for number, (role, text) in enumerate(texts)
    ]
    return {
        "model": MODEL,
        "input": [*history, *turn],
        "tools": [
            shell,
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]},
            {"type": "web_search", "external_web_access": True},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
            },
            {"type": "tool_search", "execution": "client"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198",
        "text": {"verbosity": "medium"},
        "client_metadata": {"installation": "1"},
    }


async def test_a_session_of_codex() -> None:
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
    async with saying(f"<think>\nls\n</think>\n{call}", "Two files.", context_length=65536) as (
        server,
        tokenizer,
    ):
        first = codex([])
        assert len(json.dumps(first)) > 40_000
        events = await stream_of(server, **first)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        reasoning, shell = (item for item in done if isinstance(item, dict))
        assert events[-1]["type"] == "response.completed"
        # What it sends back of the reasoning is its summary, and what it cannot read.
        turn: list[JSON] = [
            {
                "type": "reasoning",
                "id": reasoning["id"],
                "summary": reasoning["summary"],
                "encrypted_content": reasoning["encrypted_content"],
            },
            {name: shell[name] for name in ("type", "id", "status", "name", "arguments", "call_id")},
            {"type": "function_call_output", "call_id": shell["call_id"], "output": "a\nb"},
        ]
        events = await stream_of(server, **codex(turn))
        response = events[-1]["response"]
        assert isinstance(response, dict)
        assert checked(response)["output"][0]["content"][0]["text"] == "Two files."  # type: ignore[index]
        assert [tool["name"] for tool in response["tools"]] == ["shell"]
    messages = tokenizer.conversations[-1]
    assert [message["role"] for message in messages] == [
        *("system", "system", "user", "user"),
        *("assistant", "tool"),
    ]
    assert messages[4]["reasoning_content"] == "ls"
    assert messages[4]["tool_calls"][0]["function"] == {  # type: ignore[index]
        "name": "shell",
        "arguments": {"command": ["ls"]},
    }
    offered = tokenizer.template_arguments[-1]["tools"]
    assert isinstance(offered, list) and [tool["function"]["name"] for tool in offered] == ["shell"]


async def test_the_sdk_in_a_loop_of_calls() -> None:
    async with (
        saying(CALLS, CALLS, "The sea is blue.", CALLS, "The sea is blue.") as (server, tokenizer),
        client_of(server) as client,
    ):
        items: list[ResponseInputItemParam] = [{"role": "user", "content": "Hi"}]
        response = await client.responses.create(model=MODEL, input=items, tools=[LOOK])
        turns = 0
        while calls := [item for item in response.output if item.type == "function_call"]:
            turns += 1
            response = await client.responses.create(
                model=MODEL,
                previous_response_id=response.id,
                input=[
                    {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
                    for call in calls
                ],
                tools=[LOOK],
            )
        assert turns == 2 and response.output_text == "The sea is blue."
        async with client.responses.stream(model=MODEL, input=items, tools=[LOOK]) as stream:
            arguments = [
                event.snapshot
                async for event in stream
                if event.type == "response.function_call_arguments.delta"
            ]
            final = await stream.get_final_response()
        items += final.output  # type: ignore[arg-type]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "blue"}
            for item in final.output
            if item.type == "function_call"
        ]
        assert json.loads(arguments[-2]) == {"at": "sea"}
        full = await client.responses.create(model=MODEL, input=items, tools=[LOOK], store=False)
        assert full.output_text == "The sea is blue."
