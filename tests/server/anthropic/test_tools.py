"""Thinking and tools with Anthropic's client, read by the parser of a real format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import Message, MessageParam, ToolChoiceParam, ToolParam

from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRow, FakeRunner, answering, letters
from tests.server.anthropic.asking import ask, events_of, refusal
from tests.server.harness import MODEL, Lift, lift, on_socket

QWEN = "<think></think> enable_thinking <tool_call> tool_call.name"
THINKER = "<think></think> <tool_call> tool_call.name"
"""A template that cannot turn the thinking off."""
HERMES = "<tool_call> tool_call.name"
EFFORTS = "<think></think> reasoning_effort"
CALLS = (
    "<think>\nI need the weather.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Île", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
WEATHER: ToolParam = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
WAIT: ToolParam = {"name": "wait", "input_schema": {"type": "object", "properties": {}}}
HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def saying(text: str, template: str = QWEN) -> AsyncIterator[tuple[Lift, AsyncAnthropic]]:
    tokenizer = FakeTokenizer(template=template)
    async with (
        lift(FakeRunner(answering(tokenizer.marked(text))), tokenizer=tokenizer) as server,
        on_socket(server.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield server, client


def check_calls(message: Message) -> None:
    thinking, text, weather, wait = message.content
    assert thinking.type == "thinking" and thinking.thinking == "I need the weather." and thinking.signature
    assert text.type == "text" and text.text == "Let me look."
    assert weather.type == "tool_use" and wait.type == "tool_use"
    assert (weather.name, weather.input) == ("weather", {"city": "Île", "days": 2})
    assert (wait.name, wait.input) == ("wait", {})
    assert weather.id != wait.id
    assert message.stop_reason == "tool_use"
    details = message.usage.output_tokens_details
    assert details is not None and details.thinking_tokens == len("<think>\nI need the weather.\n</think>")


async def test_thinking_and_calls_whole_and_streamed() -> None:
    async with saying(CALLS) as (_, client):
        message = await client.messages.create(
            model=MODEL, max_tokens=900, messages=HI, tools=[WEATHER, WAIT], thinking={"type": "adaptive"}
        )
        check_calls(message)
        seen: list[str] = []
        async with client.messages.stream(
            model=MODEL, max_tokens=900, messages=HI, tools=[WEATHER, WAIT], thinking={"type": "adaptive"}
        ) as stream:
            async for event in stream:
                if event.type == "text":
                    assert event.snapshot.endswith(event.text)
                elif event.type == "thinking":
                    assert event.snapshot.endswith(event.thinking)
                elif event.type == "input_json":
                    assert isinstance(event.snapshot, dict)
                elif event.type == "content_block_stop":
                    seen.append(event.content_block.type)
            check_calls(await stream.get_final_message())
        assert seen == ["thinking", "text", "tool_use", "tool_use"]


async def test_arguments_come_piece_by_piece() -> None:
    async with saying(CALLS) as (server, _):
        events = events_of(await ask(server, tools=[WEATHER, WAIT], stream=True, max_tokens=900))
    pieces = [
        event["delta"]["partial_json"]  # type: ignore[index]
        for event in events
        if event.get("index") == 2 and event["type"] == "content_block_delta"
    ]
    assert len(pieces) > 5
    assert json.loads("".join(pieces)) == {"city": "Île", "days": 2}


async def test_the_answer_goes_back_as_it_came() -> None:
    """What the SDK makes of an answer, sent as history, is rendered as the model wrote it."""
    async with saying(CALLS) as (server, client):
        async with client.messages.stream(
            model=MODEL, max_tokens=900, messages=HI, tools=[WEATHER, WAIT], thinking={"type": "adaptive"}
        ) as stream:
            final = await stream.get_final_message()
        ids = [block.id for block in final.content if block.type == "tool_use"]
        server.runner.draw = answering("Sunny.")
        answer = await client.messages.create(
            model=MODEL,
            max_tokens=900,
            tools=[WEATHER, WAIT],
            messages=[
                *HI,
                {"role": "assistant", "content": final.content},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": ids[0], "content": "sun"},
                        {"type": "tool_result", "tool_use_id": ids[1], "is_error": True},
                    ],
                },
            ],
        )
        assert answer.content[0].type == "text" and answer.content[0].text == "Sunny."
        whole = bytes(token for token in prompts(server)[-1] if token < 256).decode()
    assert whole.count("sun") == 1 and "Let me look." in whole and "Error:" in whole


def prompts(server: Lift) -> list[list[int]]:
    """Of each request so far, in order."""
    found: dict[int, list[int]] = {}
    for plan in server.runner.plans:
        for span in plan.prefill:
            found.setdefault(span.row, []).extend(span.tokens)
    return list(found.values())


async def test_the_tool_runner_loops_until_there_is_no_call() -> None:
    calls: list[str] = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        calls.append(city)
        return f"sun in {city}"

    async with saying("", HERMES) as (server, client):
        tokenizer = server.tokenizer
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
        first, second = answering(tokenizer.marked(call)), answering(tokenizer.marked("It is sunny."))

        def draw(row: FakeRow) -> int:
            return (second if b"sun in Ulm" in bytes(t for t in row.tokens if t < 256) else first)(row)

        server.runner.draw = draw
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=200, messages=[{"role": "user", "content": "Weather?"}], tools=[weather]
        )
        final = await runner.until_done()
    assert calls == ["Ulm"]
    assert final.content[0].type == "text" and final.content[0].text == "It is sunny."


async def test_without_being_asked_the_template_is_told_not_to_think() -> None:
    async with saying("ok") as (server, client):
        await client.messages.create(model=MODEL, max_tokens=9, messages=HI)
        await client.messages.create(model=MODEL, max_tokens=9, messages=HI, thinking={"type": "disabled"})
        await client.messages.create(model=MODEL, max_tokens=9, messages=HI, thinking={"type": "adaptive"})
        told = [arguments.get("enable_thinking") for arguments in server.tokenizer.template_arguments]
    assert told == [False, False, None]


async def test_a_model_that_always_thinks_shows_it() -> None:
    async with saying("<think>\nHm.\n</think>\n\nok", THINKER) as (_, client):
        message = await client.messages.create(model=MODEL, max_tokens=99, messages=HI)
        assert [block.type for block in message.content] == ["thinking", "text"]
        hidden = await client.messages.create(
            model=MODEL,
            max_tokens=99,
            messages=HI,
            thinking={"type": "adaptive", "display": "omitted"},
        )
        assert hidden.content[0].type == "thinking" and hidden.content[0].thinking == ""


async def test_effort_is_for_templates_that_have_it() -> None:
    for template, told in ((EFFORTS, "high"), (QWEN, None), (HERMES, None)):
        async with saying("ok", template) as (server, client):
            for effort in ("high", "max"):
                await client.messages.create(
                    model=MODEL,
                    max_tokens=9,
                    messages=HI,
                    output_config={"effort": effort},  # type: ignore[typeddict-item]
                )
                assert server.tokenizer.template_arguments[-1].get("reasoning_effort") == told


async def test_places_of_tools_are_the_clients() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    cases: list[tuple[dict[str, object], str]] = [
        ({"tools": [search, {**WAIT, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [search, {**WAIT, "name": ""}]}, "tools[1].name"),
        ({"tools": [WAIT, search, WAIT]}, "tools[2].name"),
        ({"tools": [search, {**WAIT, "input_schema": {"type": "string"}}]}, "tools[1].input_schema"),
        ({"tools": [WAIT], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ]
    async with saying("ok", HERMES) as (server, _):
        for more, place in cases:
            error = refusal(await ask(server, **more), 400)
            assert place in str(error["message"]), (more, error)
            assert "function" not in str(error["message"])


async def test_one_call_where_no_more_are_wanted() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with saying(CALLS) as (server, _):
        reply = (await ask(server, tools=[WEATHER, WAIT], tool_choice=choice, max_tokens=900)).json()
    assert [block["name"] for block in reply["content"] if block["type"] == "tool_use"] == ["weather"]
    assert reply["stop_reason"] == "tool_use"


async def test_a_call_cut_off_by_max_tokens() -> None:
    async with saying('<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "da', HERMES) as (
        server,
        _,
    ):
        for stream in (False, True):
            limit = len('<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"')
            response = await ask(server, tools=[WEATHER], max_tokens=limit, stream=stream)
            if stream:
                assert [event["type"] for event in events_of(response)][-3:] == [
                    "content_block_stop",
                    "message_delta",
                    "message_stop",
                ]
            else:
                reply = response.json()
                assert reply["stop_reason"] == "max_tokens"
                assert reply["content"][0]["input"] == {"city": "Ulm"}


THINKS = "<think></think> enable_thinking"


def ruminating(tokenizer: FakeTokenizer) -> FakeRunner:
    """Thinks for as long as it may."""
    start, end = tokenizer.marked("<think></think>")

    def draw(row: FakeRow) -> int:
        drawn = row.tokens[len(row.tokens) - row.drawn :]
        if not drawn:
            return start
        if end not in drawn:
            return ord("m")
        return [*b"ok", EOS][min(len(drawn) - drawn.index(end) - 1, 2)]

    return FakeRunner(draw)


async def test_the_budget_ends_the_thinking() -> None:
    tokenizer = FakeTokenizer(template=THINKS, specials=("<think>", "</think>"))
    async with (
        lift(ruminating(tokenizer), tokenizer=tokenizer) as server,
        on_socket(server.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        message = await client.messages.create(
            model=MODEL, max_tokens=99, messages=HI, thinking={"type": "enabled", "budget_tokens": 7}
        )
        thinking, text = message.content
        assert thinking.type == "thinking" and thinking.thinking == "m" * 7
        assert text.type == "text" and text.text == "ok"
        assert server.tokenizer.template_arguments[-1]["enable_thinking"] is True
        details = message.usage.output_tokens_details
        assert details is not None and details.thinking_tokens == 9
        count = await client.messages.count_tokens(
            model=MODEL, messages=HI, thinking={"type": "enabled", "budget_tokens": 7}
        )
        assert count.input_tokens == message.usage.input_tokens


async def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    budget = {"type": "enabled", "budget_tokens": 7}
    async with saying("ok", HERMES) as (server, _):
        error = refusal(await ask(server, thinking=budget), 400)
        assert "it does not think" in str(error["message"])
    async with saying("ok", THINKS) as (server, _):  # where the marks are no tokens
        error = refusal(await ask(server, thinking=budget), 400)
        assert str(error["message"]).startswith("thinking.budget_tokens is not supported")


def noise(row: FakeRow) -> int:
    token = letters(row)
    return b'{}[]",: 0123456789-.truefalsn'[token % 29] if token % 2 else token


STRICT: ToolParam = {
    "name": "paint",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "dry": {"type": "boolean"}},
        "required": ["color", "dry"],
        "additionalProperties": False,
    },
}


async def test_calls_that_must_be_made_are_made() -> None:
    """Of a model that says anything, under the schema of its tool."""
    tokenizer = FakeTokenizer(template=HERMES)
    async with (
        lift(FakeRunner(noise), tokenizer=tokenizer) as server,
        on_socket(server.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        choices: list[ToolChoiceParam] = [
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "paint"},
        ]
        for choice in choices:
            for _ in range(3):
                message = await client.messages.create(
                    model=MODEL, max_tokens=900, messages=HI, tools=[STRICT], tool_choice=choice
                )
                (call,) = message.content
                assert call.type == "tool_use" and call.name == "paint"
                assert call.input["color"] in ("red", "blue") and isinstance(call.input["dry"], bool)
                assert message.stop_reason == "tool_use"


async def test_a_strict_schema_that_cannot_be_followed_is_refused_at_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tools = [WAIT, {"name": "endless", "input_schema": schema, "strict": True}]
    async with saying("ok", HERMES) as (server, _):
        for choice in ({"type": "auto"}, {"type": "any"}):
            error = refusal(await ask(server, tools=tools, tool_choice=choice), 400)
            assert str(error["message"]).startswith("tools[1].input_schema"), error


async def test_patterns_in_schemas_are_no_matter_while_nothing_is_forced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!.*x)(a)\\1$"}}}
    async with saying("ok", HERMES) as (server, _):
        response = await ask(server, tools=[{"name": "odd", "input_schema": schema}])
        assert response.status_code == 200, response.text
