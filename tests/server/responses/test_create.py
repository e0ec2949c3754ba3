"""`POST /v1/responses`: what it answers, how it streams, and what it refuses by which name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import JSON, MODEL, error_of, lift
from tests.server.media.pictures import FakeProcessor, data_uri, encoded, gradient
from tests.server.responses.asking import RESPONSES, Recorder, body, respond, response_of, stream_of

USER: JSON = {"role": "user", "content": "Hi"}


async def test_a_whole_response() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        answer = await respond(
            server, instructions="Be kind.", metadata={"a": "b"}, user="me", max_output_tokens=20
        )
        response = await response_of(server)
    assert answer.headers["x-request-id"] == answer.json()["id"]
    whole = answer.json()
    assert whole["id"].startswith("resp_") and whole["id"] != response["id"]
    assert whole["output"][0]["content"][0]["text"] == "Hello!"
    assert whole["usage"] == {
        "input_tokens": len("<system\nBe kind.>\n<user\nHi>\n<assistant\n"),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 46,
    }
    assert (
        whole.items()
        >= {
            "object": "response",
            "status": "completed",
            "model": MODEL,
            "instructions": "Be kind.",
            "metadata": {"a": "b"},
            "user": "me",
            "max_output_tokens": 20,
            "temperature": 0,
            "top_p": 1.0,
            "store": True,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "truncation": "disabled",
            "background": False,
        }.items()
    )
    assert whole["completed_at"] >= whole["created_at"]


async def test_the_stream_says_what_the_whole_response_says() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        whole = await response_of(server, seed=1)
        events = await stream_of(server, seed=1, stream_options={"include_obfuscation": False})
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(map(str, deltas)) == "Hello!"
    streamed = events[-1]["response"]
    assert isinstance(streamed, dict)
    assert events[-1]["type"] == "response.completed"
    for response in (whole, streamed):
        del response["id"], response["created_at"], response["completed_at"]
        response["output"][0]["id"] = ""  # type: ignore[index]
    assert streamed == whole


async def test_a_limit_makes_it_incomplete() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        response = await response_of(server, max_output_tokens=2)
        events = await stream_of(server, max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["completed_at"] is None
    assert events[-1]["type"] == "response.incomplete"


async def test_logprobs() -> None:
    async with lift(FakeRunner(answering("Hi"))) as server:
        asked = await response_of(server, include=["message.output_text.logprobs"], top_logprobs=2)
        only_top = await response_of(server, top_logprobs=1)
        without = await response_of(server, top_logprobs=0)

    def logprobs(response: JSON) -> list[JSON]:
        found = response["output"][0]["content"][0]["logprobs"]  # type: ignore[index]
        assert isinstance(found, list)
        return found

    assert [entry["token"] for entry in logprobs(asked)][:2] == ["H", "i"]
    assert [len(entry["top_logprobs"]) for entry in logprobs(asked)][:2] == [2, 2]  # type: ignore[arg-type]
    assert [len(entry["top_logprobs"]) for entry in logprobs(only_top)][:2] == [1, 1]  # type: ignore[arg-type]
    assert logprobs(without) == []


async def test_a_failure_of_the_model() -> None:
    faults = iter((None, None, Fault(fail=all_rows)))
    async with lift() as server:
        server.runner.fault = lambda plan: next(faults, None)
        events = await stream_of(server)
        assert [event["type"] for event in events[-3:]] == [
            "response.content_part.done",
            "response.output_item.done",
            "response.failed",
        ]
        failed = events[-1]["response"]
        assert isinstance(failed, dict) and failed["status"] == "failed"
        assert failed["error"] == {"code": "server_error", "message": "The fake failed this row."}
        assert failed["output"][0]["status"] == "incomplete"
        kept = await server.client.get(f"{RESPONSES}/{failed['id']}")
        assert kept.json() == failed
        server.runner.fail_next(Fault(fail=all_rows))
        error = error_of(await respond(server), 500)
        assert error["code"] == "engine_error"
        assert await server.metric('request_success_total{finished_reason="error"}') == 2


REFUSED: list[tuple[JSON, str]] = [
    ({"banana": 1}, "banana"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": {}}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [[]]}, "input[0]"),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"type": None, "status": "completed"}]}, "input[0].role"),
    ({"input": [{"type": "banana"}]}, "input[0]"),
    ({"input": [{"type": 5}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input[0]"),
    ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [USER, {"role": "user", "content": []}]}, "input[1].content"),
    ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input[1].call_id"),
    ({"input": [{"type": "reasoning", "summary": "a"}]}, "input[0].summary"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"id": "msg_1"}]}, "input[0].id"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"include": ["banana"]}, "include[0]"),
    ({"include": "banana"}, "include"),
    ({"truncation": "banana"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"background": True, "store": False}, "background"),
    ({"background": 1}, "background"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "banana"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"tools": [{"type": "banana"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "mood": 1}]}, "tools[0].mood"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "banana"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            }
        },
        "tool_choice.tools[0].name",
    ),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"top_k": -2}, "top_k"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
]


async def test_what_is_refused() -> None:
    async with lift() as server:
        for more, param in REFUSED:
            error = error_of(await respond(server, **more), 400)
            assert error["param"] == param, (more, error)
            place = param.removesuffix(".id").removesuffix(".call_id").split("[")[0]
            unknown = error["code"] in ("item_not_found", "previous_response_not_found")
            assert unknown or place in str(error["message"]), (more, error)
        assert error_of(await respond(server, model="other"), 404)["code"] == "model_not_found"
        missing = body()
        del missing["model"]
        error = error_of(await server.client.post(RESPONSES, json=missing), 400)
        assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
        assert error_of(await server.client.post(RESPONSES, content=b"{"), 400)["code"] == "invalid_json"
        assert server.engine.stats().prompt_tokens == 0
        assert server.app.state.context.responses._running == {}


NEUTRAL: JSON = {
    "background": False,
    "include": ["file_search_call.results", "message.input_image.image_url"],
    "instructions": None,
    "max_tool_calls": 3,
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "reasoning": {"effort": None, "mode": "standard", "context": "auto"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "client_metadata": {"x": "y"},
    "context_management": None,
    "conversation": None,
    "prompt": None,
}


async def test_what_asks_for_nothing_passes() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        response = await response_of(server, **NEUTRAL)
        assert (response["parallel_tool_calls"], response["prompt_cache_key"]) == (False, "k")
        assert (response["max_tool_calls"], response["safety_identifier"]) == (3, "s")
        for name in NEUTRAL:
            if name not in ("client_metadata",):
                await response_of(server, **{name: None})


async def test_sampling_beyond_openais() -> None:
    async with lift(FakeRunner()) as server:
        more: JSON = {"temperature": 1, "max_output_tokens": 8}
        texts = [
            (await response_of(server, seed=seed, **more))["output"][0]["content"][0]["text"]  # type: ignore[index]
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]
        stopped = await response_of(server, seed=1, stop=texts[0][3], **more)
        assert stopped["output"][0]["content"][0]["text"] == texts[0][: texts[0].index(texts[0][3])]  # type: ignore[index]


async def test_a_prompt_that_does_not_fit() -> None:
    async with lift(context_length=64) as server:
        error = error_of(await respond(server, input="x" * 100), 400)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        error = error_of(await respond(server, input="x" * 100_000), 400)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def turns(count: int) -> list[JSON]:
    return [
        {"role": role, "content": f"{role[0]}{number}"}
        for number in range(count)
        for role in ("user", "assistant")
    ] + [{"role": "user", "content": "last"}]


async def test_truncation_drops_the_oldest_turns() -> None:
    tokenizer, system = Recorder(), {"role": "system", "content": "Sys"}
    # 50 tokens are left for the answer, so this many turns fit into the rest.
    lengths = [
        len(FakeTokenizer().apply_chat_template([system, *turns(20)[2 * start :]])) for start in range(21)
    ]
    longest = max(length for length in lengths if length < 150)
    async with lift(FakeRunner(answering("a")), tokenizer=tokenizer, context_length=200) as server:
        assert error_of(await respond(server, input=turns(20)), 400)["code"] == "context_length_exceeded"
        response = await response_of(
            server, instructions="Sys", input=turns(20), truncation="auto", max_output_tokens=50
        )
        assert response["truncation"] == "auto"
        assert isinstance(response["usage"], dict) and response["usage"]["input_tokens"] == longest
        await response_of(server, input=turns(1), truncation="auto")
        assert [message["content"] for message in tokenizer.conversations[-1]] == ["u0", "a0", "last"]
        hopeless = await respond(server, input="x" * 300, truncation="auto")
        assert error_of(hopeless, 400)["code"] == "context_length_exceeded"
        await response_of(server, input=[{**USER, "content": "x" * 100_000}, USER], truncation="auto")
        assert [message["content"] for message in tokenizer.conversations[-1]] == ["Hi"]


async def test_an_image_reaches_the_model() -> None:
    image = gradient(4, 5)
    part = {"type": "input_image", "image_url": data_uri(encoded(image)), "detail": "original"}
    processor = FakeProcessor()
    async with lift(FakeRunner(answering("A gradient.")), processor=processor) as server:
        content = [{"type": "input_text", "text": "What is this?"}, part]
        response = await response_of(server, input=[{"role": "user", "content": content}])
        items = (await server.client.get(f"{RESPONSES}/{response['id']}/input_items")).json()
        broken = {**part, "image_url": "data:image/png;base64,AAAA"}
        error = error_of(
            await respond(server, input=[USER, {"role": "user", "content": [content[0], broken]}]), 400
        )
    [(messages, [seen])] = processor.calls
    assert messages == [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]}
    ]
    np.testing.assert_array_equal(seen.pixels, image)
    assert items["data"][0]["content"] == content
    assert (error["param"], error["code"]) == ("input[1].content[1]", "invalid_image")


async def test_images_need_a_model_that_sees() -> None:
    image = {"type": "input_image", "image_url": data_uri(encoded(gradient())), "detail": "auto"}
    async with lift() as server:
        asked = [USER, {"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]}]
        error = error_of(await respond(server, input=asked), 400)
        assert (error["param"], error["code"]) == ("input[1].content[1]", "unsupported_value")
        assert "input[1].content[1]" in str(error["message"])
        for broken, param in (
            ({"type": "input_image"}, "image_url"),
            ({"type": "input_image", "file_id": "file-1", "image_url": "data:,"}, "file_id"),
        ):
            error = error_of(await respond(server, input=[{"role": "user", "content": [broken]}]), 400)
            assert error["param"] == f"input[0].content[0].{param}"
        answer = {"role": "assistant", "content": [image]}
        assert error_of(await respond(server, input=[USER, answer]), 400)["param"] == "input[1].content[0]"


async def test_the_model_is_not_there_yet() -> None:
    async with lift(start=False) as server:
        assert error_of(await respond(server), 503)["code"] == "unavailable"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_template_that_refuses(stream: bool) -> None:
    tokenizer = Recorder()
    tokenizer.refuse = "Roles must alternate."
    async with lift(tokenizer=tokenizer) as server:
        error = error_of(await respond(server, stream=stream), 400)
    assert (error["param"], error["message"]) == ("input", "Roles must alternate.")
