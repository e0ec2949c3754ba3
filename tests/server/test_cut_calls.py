"""Streams of nothing but calls, and calls that `max_tokens` cut, on every surface that has calls."""

from __future__ import annotations

import json

import pytest
from openai import AsyncOpenAI

from tests.server.harness import JSON, MODEL, on_socket, sse, stream_of
from tests.server.test_tools import LOOK, QWEN, saying

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
INSIDE = CALL.index(' "sea"')
XML = "<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n</function>\n</tool_call>"
FUNCTION = LOOK["function"]
assert isinstance(FUNCTION, dict)


async def test_a_stream_of_calls_alone_begins_with_content_null_as_openais_does() -> None:
    async with saying(CALL) as server:
        chunks = stream_of(await server.chat(tools=[LOOK], stream=True))
        first = chunks[0]["choices"][0]["delta"]  # type: ignore[index]
        assert list(first) == ["role", "content", "tool_calls"]
        assert (first["role"], first["content"]) == ("assistant", None)
        assert first["tool_calls"][0]["function"] == {"name": "look", "arguments": ""}
        assert all("content" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])  # type: ignore[index]
        async with on_socket(server.app) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = client.chat.completions.stream(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                tools=[LOOK],  # type: ignore[list-item]
            )
            async with asked as stream:
                message = (await stream.get_final_completion()).choices[0].message
    assert message.content is None and message.role == "assistant"
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"at": "sea"}']


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("Hi", [{"role": "assistant", "content": "Hi"}, {}]),
        ("", [{"role": "assistant", "content": ""}]),
        ("<think>\nhm\n</think>", [{"role": "assistant", "reasoning_content": "hm"}, {}]),
    ],
)
async def test_other_answers_beside_tools(text: str, deltas: list[JSON]) -> None:
    """Each choice says its role once, in its first chunk."""
    async with saying(text) as server:
        chunks = stream_of(await server.chat(tools=[LOOK], stream=True, n=2))
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]  # type: ignore[index]
        told: list[JSON] = [choices[0]["delta"]]
        for choice in choices[1:]:
            assert "role" not in choice["delta"]
            for name, value in choice["delta"].items():
                told[0][name] = told[0][name] + value
        if len(deltas) > 1:
            told.append(choices[-1]["delta"])
        assert told == deltas and choices[-1]["finish_reason"] == "stop"


async def test_a_call_that_is_cut_in_a_chat() -> None:
    async with saying(CALL) as server:
        choice = (await server.chat(tools=[LOOK], max_tokens=INSIDE)).json()["choices"][0]
        chunks = stream_of(await server.chat(tools=[LOOK], max_tokens=INSIDE, stream=True))
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at":'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
    assert "".join(pieces) == '{"at":'
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]


async def test_a_call_that_is_cut_in_a_response() -> None:
    body = {"model": MODEL, "input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    async with saying(CALL) as server:
        asked = await server.client.post("/v1/responses", json={**body, "max_output_tokens": INSIDE})
        response = asked.json()
        more = {"model": MODEL, "input": "Go on", "previous_response_id": response["id"]}
        assert (await server.client.post("/v1/responses", json=more)).status_code == 200
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    (item,) = response["output"]
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", '{"at":')


async def test_a_call_that_is_cut_in_a_message() -> None:
    tool = {"name": "look", "input_schema": FUNCTION["parameters"]}
    body = {"model": MODEL, "max_tokens": INSIDE, "messages": [{"role": "user", "content": "Hi"}]}
    async with saying(CALL) as server:
        whole = (await server.client.post("/v1/messages", json={**body, "tools": [tool]})).json()
        text = (await server.client.post("/v1/messages", json={**body, "tools": [tool], "stream": True})).text
    (block,) = whole["content"]
    assert (block["type"], block["input"], whole["stop_reason"]) == ("tool_use", {}, "max_tokens")
    events = [json.loads(data) for _, data in sse(text)]
    pieces = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
    assert "".join(pieces) == '{"at":'
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_what_cannot_be_known_to_be_a_call_stays_text() -> None:
    async with saying(XML, template=QWEN + " <function= <parameter=") as server:
        cut = (await server.chat(tools=[LOOK], max_tokens=40)).json()["choices"][0]
        whole = (await server.chat(tools=[LOOK])).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (XML[:40], "length")
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "look"


async def test_a_cut_within_the_mark_behind_a_call_leaves_no_text() -> None:
    async with saying(CALL) as server:
        for cut in range(CALL.index("</tool_call>") + 1, len(CALL)):
            message = (await server.chat(tools=[LOOK], max_tokens=cut)).json()["choices"][0]["message"]
            assert message["content"] is None
            assert message["tool_calls"][0]["function"]["arguments"] == '{"at": "sea"}'
