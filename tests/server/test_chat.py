"""Chat completions: whole and streamed answers, checked by OpenAI's own types."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.harness import MODEL, error_of, lift, stream_of

HI = len(b"user\nHi") + 3 + len(b"assistant\n") + 1
"""Tokens of the fake's template around one user message "Hi": three marks of two messages, a line break."""


async def test_a_whole_answer() -> None:
    async with lift(FakeRunner(answering("Paris, ça va"))) as server:
        response = await server.chat()
    answer = ChatCompletion.model_validate(response.json(), strict=True)
    assert answer.id.startswith("chatcmpl-") and answer.id == response.headers["x-request-id"]
    assert answer.model == MODEL
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert choice.message.content == "Paris, ça va"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    usage = answer.usage
    assert usage is not None
    completion = len("Paris, ça va".encode()) + 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (HI, completion)
    assert usage.total_tokens == HI + completion
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 0


async def test_a_stream_says_the_same() -> None:
    async with lift(FakeRunner(answering("Paris, ça va"))) as server:
        chunks = [
            ChatCompletionChunk.model_validate(chunk, strict=True)
            for chunk in stream_of(await server.chat(stream=True))
        ]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    first, *rest = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert [choice.delta.role for choice in rest] == [None] * len(rest)
    assert "".join(choice.delta.content or "" for choice in rest) == "Paris, ça va"
    assert "\ufffd" not in "".join(choice.delta.content or "" for choice in rest)
    assert [choice.finish_reason for choice in rest] == [None] * (len(rest) - 1) + ["stop"]


async def test_usage_comes_in_a_last_chunk_when_asked_for() -> None:
    async with lift(FakeRunner(answering("abc"))) as server:
        chunks = stream_of(await server.chat(stream=True, stream_options={"include_usage": True}))
        without = stream_of(await server.chat(stream=True, stream_options={"include_usage": False}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": HI,
        "completion_tokens": 4,
        "total_tokens": HI + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    ChatCompletionChunk.model_validate(chunks[-1], strict=True)
    assert all("usage" not in chunk for chunk in without)


async def test_length_stop_string_and_stop_token() -> None:
    async with lift(FakeRunner(answering("abcdef"))) as server:
        limited = (await server.chat(max_tokens=2)).json()["choices"][0]
        by_other_name = (await server.chat(max_completion_tokens=2)).json()["choices"][0]
        string = (await server.chat(stop="de")).json()["choices"][0]
        strings = (await server.chat(stop=["x", "cd"])).json()["choices"][0]
        token = (await server.chat(stop_token_ids=[ord("d")])).json()["choices"][0]
    assert (limited["message"]["content"], limited["finish_reason"]) == ("ab", "length")
    assert by_other_name == limited
    assert (string["message"]["content"], string["finish_reason"]) == ("abc", "stop")
    assert (strings["message"]["content"], strings["finish_reason"]) == ("ab", "stop")
    assert (token["message"]["content"], token["finish_reason"]) == ("abc", "stop")


async def test_ignore_eos_runs_to_max_tokens() -> None:
    async with lift(FakeRunner(answering("ab"))) as server:
        response = await server.chat(ignore_eos=True, max_tokens=5)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 5


async def test_sampling_parameters_reach_the_runner() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        await server.chat(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=7)
        plans = [new for plan in server.runner.plans for new in plan.admit]
    sampling = plans[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.seed, plans[-1].seed) == (7, 7)
    assert sampling.max_tokens is None and sampling.logprobs is None


async def test_defaults_are_openais() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        await server.client.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "Hi"}],
                "top_p": None,
                "stop": None,
            },
        )
        sampling = [new for plan in server.runner.plans for new in plan.admit][-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 0, ())


class Recording(FakeTokenizer):
    """Keeps the messages that the template is given."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, object]] = []
        self.end = (True, False)

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        documents: Sequence[dict[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> list[int]:
        self.messages = messages
        self.end = (add_generation_prompt, continue_final_message)
        return super().apply_chat_template(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )


async def test_messages_are_handed_to_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{oops"}}
    tokenizer = Recording()
    async with lift(FakeRunner(answering("a")), tokenizer=tokenizer) as server:
        response = await server.chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                },
                {"role": "developer", "content": "be brief"},
                {"role": "assistant", "content": None, "tool_calls": [call, broken], "audio": None},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "tool", "tool_call_id": "c2", "content": "?"},
                {"role": "system", "content": "mid-conversation"},
                {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "hm"},
                {"role": "assistant", "content": "I", "refusal": "won't"},
                {"role": "user", "name": "Ann", "content": "", "tool_call_id": "", "reasoning_content": ""},
                {"role": "assistant", "function_call": call["function"]},
                {"role": "function", "name": "add", "content": "3"},
            ]
        )
        assert response.status_code == 200, response.text
    assert tokenizer.messages == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{oops"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "?"},
        {"role": "system", "content": "mid-conversation"},
        {"role": "assistant", "content": "no", "reasoning_content": "hm"},
        {"role": "assistant", "content": "I\nwon't"},
        {"role": "user", "name": "Ann", "content": ""},
        {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": {"a": 1}}},
        {"role": "function", "name": "add", "content": "3"},
    ]


async def test_template_variables_are_passed_on_and_reserved_ones_are_not() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        response = await server.chat(chat_template_kwargs={"enable_thinking": False})
        assert response.status_code == 200
        assert server.tokenizer.template_arguments[-1] == {"tools": None, "enable_thinking": False}
        for name in ("tokenize", "messages", "add_generation_prompt", "tools", "chat_template"):
            error = error_of(await server.chat(chat_template_kwargs={name: True}), 400)
            assert error["param"] == f"chat_template_kwargs.{name}"
        # Also one that no template can be given, being no variable of it.
        assert error_of(await server.chat(chat_template_kwargs={"self": 1}), 400)["param"] == "messages"


async def test_a_templates_refusal_is_a_400_with_its_message() -> None:
    tokenizer = FakeTokenizer(refuse="Roles must alternate user/assistant/user")
    async with lift(tokenizer=tokenizer) as server:
        error = error_of(await server.chat(), 400)
    assert error["message"] == "Roles must alternate user/assistant/user"
    assert error["param"] == "messages"


async def test_without_a_template_chat_is_refused() -> None:
    async with lift(tokenizer=FakeTokenizer(chat_template=False)) as server:
        assert "/v1/completions" in str(error_of(await server.chat(), 400)["message"])
        assert (await server.complete(max_tokens=1)).status_code == 200


async def test_a_long_prompt_and_one_too_long() -> None:
    text = "x" * 100_000
    async with lift(FakeRunner(answering("ok")), context_length=200_000) as server:
        response = await server.chat(messages=[{"role": "user", "content": text}])
        assert response.json()["choices"][0]["message"]["content"] == "ok"
        assert response.json()["usage"]["prompt_tokens"] == HI - 2 + len(text)
        long = [{"role": "user", "content": text}] * 3
        error = error_of(await server.chat(messages=long), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


class Slow(FakeTokenizer):
    """Tokenizes "long" only once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "long":
            self.begun.set()
            assert self.go_on.wait(10)
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_a_prompt_being_tokenized_holds_nobody_up() -> None:
    tokenizer = Slow()
    async with lift(FakeRunner(answering("ok")), tokenizer=tokenizer) as server:
        long = asyncio.create_task(server.complete(prompt="long"))
        assert await asyncio.to_thread(tokenizer.begun.wait, 10)
        assert (await server.complete()).json()["choices"][0]["text"] == "ok"
        assert not long.done()
        tokenizer.go_on.set()
        assert (await long).json()["choices"][0]["text"] == "ok"


async def test_an_answer_of_nothing_but_the_end() -> None:
    async with lift(FakeRunner(answering([EOS]))) as server:
        whole = (await server.chat()).json()
        chunks = stream_of(await server.chat(stream=True))
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]  # type: ignore[index]
