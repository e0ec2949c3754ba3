"""Calls that must be made or must follow their schema, and thinking of bounded length."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import jsonschema
import pydantic
import pytest
from openai import AsyncOpenAI, pydantic_function_tool

from chairlift.server.settings import ParserSettings, ServerSettings
from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import Draw, FakeRow, FakeRunner, answering, letters
from tests.server.harness import JSON, MODEL, Lift, error_of, lift, on_socket

SCHEMA: JSON = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "sky"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["at", "n"],
    "additionalProperties": False,
}
LOOK: JSON = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
STRICT: JSON = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
WAIT: JSON = {"type": "function", "function": {"name": "wait"}}
QWEN = "<think></think> enable_thinking <tool_call> tool_call.name"
TEMPLATES = {
    "hermes": QWEN,
    "qwen3_coder": "<tool_call>\n<function=",
    "glm": "<arg_key>",
    "glm47": "</arg_key><arg_value>",
    "minimax_m2": "<minimax:tool_call>",
    "seed_oss": "<seed:tool_call>",
    "mistral": "[TOOL_CALLS] [ARGS]",
    "mistral, older": "[TOOL_CALLS]",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜> ```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "llama3_json": '{"name": function name, "parameters":',
    "granite": "<|tool_call|>",
    "nemotron": "<TOOLCALL>",
    "cohere": "<|START_ACTION|>",
    "internlm": "<|action_start|>",
    "gemma4": "<|tool_call> <tool_call|>",
    "harmony": "<|channel|> <|message|> <|start|>",
}
SPECIALS = {
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    "harmony": ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    "hermes": ("<think>", "</think>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}


def noise(row: FakeRow) -> int:
    token = letters(row)
    return EOS if token == ord("q") else b'{}[]",: 0123456789-.truefalsn'[token % 29] if token % 2 else token


@asynccontextmanager
async def drawing(draw: Draw, template: str, **more: object) -> AsyncIterator[Lift]:
    tokenizer = FakeTokenizer(template=template, **more)  # type: ignore[arg-type]
    async with lift(FakeRunner(draw), tokenizer=tokenizer) as server:
        yield server


def calls_of(answer: JSON) -> list[tuple[str, JSON]]:
    choice = answer["choices"][0]  # type: ignore[index]
    assert choice["finish_reason"] == "tool_calls", answer
    assert choice["message"]["content"] is None
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
async def test_a_call_that_must_be_made_is_made(family: str) -> None:
    draw, specials = noise, SPECIALS.get(family, ())
    if family == "harmony":  # noise would think for ever
        begun = FakeTokenizer(specials=specials).marked("<|channel|>commentary to=functions.look")
        draw = answering([*begun, *b"}" * 99])
    async with drawing(draw, TEMPLATES[family], specials=specials) as server:
        named = {"type": "function", "function": {"name": "look"}}
        for choice, names in (("required", {"look", "wait"}), (named, {"look"})):
            body = {"tools": [LOOK, WAIT], "tool_choice": choice, "parallel_tool_calls": False}
            response = await server.chat(**body)
            assert response.status_code == 200, response.text
            ((name, arguments),) = calls_of(response.json())
            assert name in names
            jsonschema.validate(arguments, SCHEMA if name == "look" else {"maxProperties": 0})


async def test_what_the_model_would_call_anyway_stays_as_it_is() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sky", "n": 7}}\n</tool_call>'
    async with drawing(answering(f"<think>hm</think>\n\n{call}\n{call}"), QWEN) as server:
        both = (await server.chat(tools=[LOOK, WAIT], tool_choice="required")).json()
        one = (await server.chat(tools=[LOOK], tool_choice="required", parallel_tool_calls=False)).json()
    assert both["choices"][0]["message"]["reasoning_content"] == "hm"
    assert calls_of(both) == [("look", {"at": "sky", "n": 7})] * 2
    assert calls_of(one) == [("look", {"at": "sky", "n": 7})]


async def test_only_allowed_tools_are_called() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "wait"}}]}
    async with drawing(noise, TEMPLATES["nemotron"]) as server:
        answer = await server.chat(
            tools=[LOOK, WAIT],
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
            parallel_tool_calls=False,
        )
        shown = server.tokenizer.template_arguments[-1]["tools"]
    assert {name for name, _ in calls_of(answer.json())} == {"wait"}
    assert isinstance(shown, list) and len(shown) == 2


@pytest.mark.parametrize(
    "family",
    [
        "hermes",
        "mistral",
        "kimi_k2",
        "deepseek_v3",
        "llama3_json",
        "harmony",
        "qwen3_coder",
        "glm47",
        "minimax_m2",
    ],
)
async def test_strict_arguments_follow_their_schema(family: str) -> None:
    beginnings = {
        "hermes": 'Let me see. <tool_call>{"name": "look", "arguments": {"at": "nowhere',
        "mistral": '[TOOL_CALLS]look[ARGS]{"at": "nowhere',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_",
        "qwen3_coder": "I look.\n<tool_call>\n<function=look>\n<parameter=at>\nnowhere",
        "glm47": "<tool_call>look<arg_key>at</arg_key><arg_value>nowhere",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">nowhere',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{",
        "llama3_json": '{"name": "look", "parameters": {"at": "nowhere',
        "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "nowhere',
    }
    tokenizer = FakeTokenizer(specials=SPECIALS.get(family, ()))
    text = tokenizer.marked(beginnings[family])
    draw = answering([*text, *b"}" * 40])
    async with drawing(draw, TEMPLATES[family], specials=SPECIALS.get(family, ())) as server:
        answer = (await server.chat(tools=[STRICT], parallel_tool_calls=False)).json()
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


async def test_where_no_calls_are_read() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    said = '{"at": "sea", "n": 1}'
    settings = ServerSettings(parsers=ParserSettings(tool_call="none"))
    async with lift(FakeRunner(answering(said)), settings=settings) as server:
        content = (await server.chat(tools=[WAIT], response_format=form)).json()
        forced = (await server.chat(tools=[WAIT], tool_choice="required", parallel_tool_calls=False)).json()
        assert error_of(await server.chat(tools=[STRICT]), 400)["param"] == "tools[0].function.strict"
    assert content["choices"][0]["message"]["content"] == said
    assert calls_of(forced) == [("wait", {})]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
async def test_a_schema_that_nothing_is_held_to_may_be_any(family: str) -> None:
    odd = {
        "type": "object",
        "properties": {"at": {"type": "string", "pattern": "(?=odd)"}, "n": {"type": "odd"}},
    }
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    said = '<tool_call>\n{"name": "odd", "arguments": {"at": "x", "n": 1}}\n</tool_call>'
    if family == "qwen3_coder":
        said = "<tool_call>\n<function=odd>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>"
    async with drawing(answering(said), TEMPLATES[family]) as server:
        free = (await server.chat(tools=[tool])).json()
        beside = (await server.chat(tools=[STRICT, tool])).json()
        error = error_of(await server.chat(tools=[STRICT, tool], tool_choice="required"), 400)
    assert calls_of(free) == calls_of(beside)
    assert calls_of(free)[0][1]["at"] == "x"
    assert error["param"] == "tools[1].function.parameters"


async def test_strict_tools_leave_text_free() -> None:
    async with drawing(answering("Use a < b, or <tool>."), QWEN) as server:
        answer = (await server.chat(tools=[STRICT])).json()
    assert answer["choices"][0]["message"]["content"] == "Use a < b, or <tool>."


async def test_openais_parse_helper_gets_its_models() -> None:
    class Look(pydantic.BaseModel):
        at: str
        n: int

    call = '<tool_call>\n{"name": "Look", "arguments": {"at": "sky", "n": 7}}\n</tool_call>'
    async with (
        drawing(answering(call), QWEN) as server,
        on_socket(server.app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        completion = await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=[pydantic_function_tool(Look)]
        )
        async with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=[pydantic_function_tool(Look)]
        ) as stream:
            streamed = await stream.get_final_completion()
    for found in (completion, streamed):
        (parsed,) = found.choices[0].message.tool_calls or ()
        assert parsed.function.parsed_arguments == Look(at="sky", n=7)


async def test_content_under_a_schema_or_a_call() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    for said in ('{"at": "sea", "n": 1}', call):
        async with drawing(answering(said), QWEN) as server:
            message = (await server.chat(tools=[WAIT], response_format=form)).json()["choices"][0]["message"]
        if said is call:
            assert message["tool_calls"][0]["function"]["name"] == "wait"
        else:
            assert message["content"] == said
    xml = "<tool_call>\n<function=wait>\n</function>\n</tool_call>"
    async with drawing(answering(xml), TEMPLATES["qwen3_coder"]) as server:
        answer = (await server.chat(tools=[WAIT], response_format=form)).json()
    assert calls_of(answer) == [("wait", {})]


def thinking_for_ever(row: FakeRow) -> int:
    """Thinks on; answers "ok" once the thinking is over."""
    drawn = row.tokens[len(row.tokens) - row.drawn :] if row.drawn else []
    if THINK_END not in drawn:
        return b"thought "[row.drawn % 8]
    return [*b"ok", EOS][min(len(drawn) - drawn.index(THINK_END) - 1, 2)]


THINK_START, THINK_END = 260, 261
THINK = ("<think>", "</think>")


async def test_a_budget_ends_the_thinking() -> None:
    async with drawing(thinking_for_ever, QWEN, specials=THINK, opens="<think>\n") as server:
        for budget in (0, 1, 7, 40):
            answer = (await server.chat(thinking_token_budget=budget)).json()
            message = answer["choices"][0]["message"]
            thought = ("thought " * 5)[:budget]
            assert (message.get("reasoning_content", ""), message["content"]) == (thought.rstrip(), "ok")
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1
            assert answer["usage"]["completion_tokens"] == budget + 4


async def test_a_budget_that_is_not_used_up_changes_nothing() -> None:
    tokenizer = FakeTokenizer(specials=THINK)
    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    for text in (f"<think>hm</think>{call}", f"hm {call}"):
        async with drawing(answering(tokenizer.marked(text)), QWEN, specials=THINK) as server:
            free = (await server.chat(tools=[WAIT])).json()
            bounded = (await server.chat(tools=[WAIT], thinking_token_budget=2)).json()
        for answer in (free, bounded):
            answer["choices"][0]["message"]["tool_calls"][0].pop("id")
        assert bounded["choices"] == free["choices"]


async def test_a_budget_before_content_under_a_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    async with drawing(thinking_for_ever, QWEN, specials=THINK, opens="<think>\n") as server:
        answer = (await server.chat(thinking_token_budget=5, response_format=form)).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "thoug"
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


@pytest.mark.parametrize(
    ("template", "more", "param"),
    [
        ("", {"thinking_token_budget": 5}, "thinking_token_budget"),
        (QWEN, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (QWEN, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (TEMPLATES["harmony"], {"thinking_token_budget": 5}, "thinking_token_budget"),
        (TEMPLATES["gemma4"], {"tools": [WAIT, STRICT]}, "tools[1].function.strict"),
        (QWEN, {"tools": [LOOK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            QWEN,
            {
                "tools": [
                    LOOK,
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "odd"}}}},
                    },
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
    ],
)
async def test_what_is_refused(template: str, more: JSON, param: str) -> None:
    async with drawing(noise, template) as server:
        error = error_of(await server.chat(**more), 400)
    assert error["param"] == param, error
