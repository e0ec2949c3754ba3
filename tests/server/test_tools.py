"""Tools and thinking in chat: what the template gets, what clients get, and OpenAI's own helpers on top."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRow, FakeRunner, answering
from tests.server.harness import JSON, MODEL, Lift, error_of, lift, on_socket, stream_of

LOOK: JSON = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
WAIT: JSON = {"type": "function", "function": {"name": "wait"}}
QWEN = "<think></think> enable_thinking <tool_call> tool_call.name"
CALLS = (
    "<think>\nhm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sea\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)


@asynccontextmanager
async def saying(text: str, *, template: str = QWEN, **more: object) -> AsyncIterator[Lift]:
    tokenizer = FakeTokenizer(template=template, **more)  # type: ignore[arg-type]
    async with lift(FakeRunner(answering(tokenizer.marked(text))), tokenizer=tokenizer) as server:
        yield server


async def test_a_whole_answer_with_thinking_and_calls() -> None:
    async with saying(CALLS) as server:
        response = await server.chat(tools=[LOOK, WAIT])
    choice = ChatCompletion.model_validate(response.json(), strict=True).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert response.json()["choices"][0]["message"]["reasoning_content"] == "hm"
    calls = choice.message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
        ("function", "look", '{"at": "the \\"sea\\""}'),
        ("function", "wait", "{}"),
    ]
    usage = response.json()["usage"]
    thinking = len("<think>\nhm\n</think>")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thinking}
    assert usage["completion_tokens"] == len(CALLS) + 1


async def test_a_stream_says_the_same() -> None:
    async with saying(CALLS) as server:
        chunks = stream_of(await server.chat(tools=[LOOK, WAIT], stream=True))
    deltas = [ChatCompletionChunk.model_validate(chunk, strict=True).choices[0] for chunk in chunks]
    raw = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert "".join(delta.get("reasoning_content", "") for delta in raw) == "hm"
    assert "".join(choice.delta.content or "" for choice in deltas) == "I look."
    calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    starts = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function and call.function.name) for call in starts] == [
        (0, "function", "look"),
        (1, "function", "wait"),
    ]
    pieces = [call.function.arguments or "" for call in calls if call.index == 0 and call.function]
    assert "".join(pieces) == '{"at": "the \\"sea\\""}'
    assert len([piece for piece in pieces if piece]) > 5  # as they come
    assert deltas[-1].finish_reason == "tool_calls"


async def test_openais_helpers_put_a_stream_together() -> None:
    async with (
        saying(CALLS) as server,
        on_socket(server.app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[LOOK, WAIT],  # type: ignore[list-item]
        ) as stream,
    ):
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = (await stream.get_final_completion()).choices[0]
    assert [(event.index, event.name, event.arguments) for event in done] == [
        (0, "look", '{"at": "the \\"sea\\""}'),
        (1, "wait", "{}"),
    ]
    assert final.finish_reason == "tool_calls" and final.message.content == "I look."
    assert [call.function.name for call in final.message.tool_calls or ()] == ["look", "wait"]


async def test_the_template_gets_the_tools() -> None:
    async with saying("ok") as server:
        await server.chat(tools=[LOOK, WAIT])
        offered = server.tokenizer.template_arguments[-1]["tools"]
        await server.chat(tools=[LOOK], tool_choice="none")
        hidden = server.tokenizer.template_arguments[-1]["tools"]
    assert offered == [
        LOOK,
        {
            "type": "function",
            "function": {
                "name": "wait",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    ]
    assert hidden is None


async def test_allowed_tools_are_the_only_ones_shown() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
    async with saying("ok") as server:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        response = await server.chat(tools=[LOOK, WAIT], tool_choice=choice)
        assert response.status_code == 200, response.text
        assert server.tokenizer.template_arguments[-1]["tools"] == [LOOK]


@pytest.mark.parametrize("more", [{}, {"tools": [LOOK], "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_marks_of_calls_are_content(more: JSON) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    async with saying(text) as server:
        choice = (await server.chat(**more)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


async def test_without_parallel_calls_the_answer_ends_with_the_first() -> None:
    async with saying(CALLS + " and a long rest" * 100) as server:
        response = (await server.chat(tools=[LOOK], parallel_tool_calls=False)).json()
        stats = server.engine.stats()
    choice = response["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
    assert choice["finish_reason"] == "tool_calls"
    assert response["usage"]["completion_tokens"] < len(CALLS)
    assert stats.finished["stop"] == 1  # type: ignore[index]


async def test_a_call_cut_off_is_no_whole_call() -> None:
    async with saying(CALLS) as server:
        choice = (await server.chat(tools=[LOOK], max_tokens=CALLS.index("sea"))).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": "the \\"'


async def test_special_tokens_are_read_and_others_left_out() -> None:
    specials = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<pad>")
    async with saying(CALLS.replace("look.", "look.<pad>"), specials=specials) as server:
        answer = (await server.chat(tools=[LOOK, WAIT])).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "hm")
    assert len(message["tool_calls"]) == 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("\nhm\n") + 2


async def test_a_prompt_that_opens_the_thinking() -> None:
    async with saying("hm\n</think>\n\nok", opens="<think>\n") as server:
        answer = (await server.chat()).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("ok", "hm")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm\n</think>")


async def test_reasoning_may_be_left_out() -> None:
    async with saying("<think>hm</think>ok") as server:
        whole = (await server.chat(include_reasoning=False)).json()
        chunks = stream_of(await server.chat(include_reasoning=False, stream=True))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "ok", "refusal": None}
    assert "reasoning" not in json.dumps(chunks)


async def test_logprobs_are_those_of_the_content() -> None:
    async with saying("<think>hm</think>ok") as server:
        whole = (await server.chat(logprobs=True)).json()["choices"][0]
        chunks = stream_of(await server.chat(logprobs=True, stream=True))
    tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert tokens == ["o", "k", "</s>"]
    streamed = [
        entry["token"]
        for chunk in chunks
        if (logprobs := chunk["choices"][0]["logprobs"])  # type: ignore[index]
        for entry in logprobs["content"]
    ]
    assert streamed == tokens


@pytest.mark.parametrize(
    ("template", "asked", "given"),
    [
        ("enable_thinking", {"enable_thinking": False}, {"enable_thinking": False}),
        ("enable_thinking", {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ("thinking", {"enable_thinking": True}, {"thinking": True}),
        (
            "thinking",
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": False},
        ),
        ("enable_thinking", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("enable_thinking", {"reasoning_effort": "high"}, {"enable_thinking": True}),
        ("reasoning_effort", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ("reasoning_effort", {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        ("reasoning_effort == 'xhigh'", {"reasoning_effort": "xhigh"}, {"reasoning_effort": "xhigh"}),
        ("reasoning_effort", {"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}),
        ("reasoning_effort thinking", {"reasoning_effort": "none"}, {"thinking": False}),
        ("", {"reasoning_effort": "medium"}, {}),
        ("", {"reasoning_effort": "none"}, {}),
        ("", {"enable_thinking": False}, {}),
        ("<think></think>", {"enable_thinking": True}, {}),
    ],
)
async def test_thinking_in_the_templates_words(template: str, asked: JSON, given: JSON) -> None:
    async with saying("ok", template=template) as server:
        response = await server.chat(**asked)
        assert response.status_code == 200, response.text
        assert server.tokenizer.template_arguments[-1] == {"tools": None, **given}


@pytest.mark.parametrize(
    ("template", "more", "param"),
    [
        ("", {"enable_thinking": True}, "enable_thinking"),
        ("<think></think>", {"enable_thinking": False}, "enable_thinking"),
        ("", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("<think></think>", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("reasoning_effort", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("", {"reasoning_effort": "much"}, "reasoning_effort"),
        (
            "enable_thinking",
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
        (
            "enable_thinking",
            {"enable_thinking": True, "reasoning_effort": "none"},
            "reasoning_effort",
        ),
        ("", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ("", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ("", {"tools": [LOOK, LOOK]}, "tools[1].function.name"),
        (
            "",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ("", {"tool_choice": "required"}, "tool_choice"),
        ("", {"tool_choice": "some", "tools": [LOOK]}, "tool_choice"),
        ("", {"tool_choice": {"type": "custom"}, "tools": [LOOK]}, "tool_choice"),
        (
            "",
            {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "wait"}}},
            "tool_choice.function.name",
        ),
        (
            "",
            {
                "tools": [LOOK],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
async def test_what_is_refused(template: str, more: JSON, param: str) -> None:
    async with saying("ok", template=template) as server:
        error = error_of(await server.chat(**more), 400)
    assert error["param"] == param, error


async def test_a_budget_ends_the_thinking() -> None:
    """Opened by the model or by the prompt, by itself or not."""
    for opens in ("", "<think>\n"):
        tokenizer = FakeTokenizer(template=QWEN, opens=opens, specials=("<think>", "</think>"))
        start, end = tokenizer.marked("<think></think>")

        def draw(row: FakeRow, opens: str = opens, start: int = start, end: int = end) -> int:
            drawn = row.tokens[len(row.tokens) - row.drawn :]
            if not drawn and not opens:
                return start
            if end not in drawn:
                return ord("m")
            return [*b"ok", EOS][min(len(drawn) - drawn.index(end) - 1, 2)]

        async with lift(FakeRunner(draw), tokenizer=tokenizer) as server:
            for budget in (0, 1, 5):
                reply = (await server.chat(thinking_token_budget=budget)).json()
                message = reply["choices"][0]["message"]
                assert message["content"] == "ok"
                assert message.get("reasoning_content", "") == "m" * budget
            assert (await server.chat(thinking_token_budget=3, max_tokens=2)).status_code == 200
            error = error_of(await server.chat(thinking_token_budget=-1), 400)
            assert error["param"] == "thinking_token_budget"


async def test_a_budget_where_the_prompt_says_not_to_think() -> None:
    tokenizer = FakeTokenizer(
        template=QWEN, opens="<think>\n\n</think>\n\n", specials=("<think>", "</think>")
    )
    async with lift(FakeRunner(answering("ok")), tokenizer=tokenizer) as server:
        for budget in (0, 5):
            reply = (await server.chat(thinking_token_budget=budget)).json()
            assert reply["choices"][0]["message"] == {"role": "assistant", "content": "ok", "refusal": None}
