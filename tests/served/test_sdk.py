"""OpenAI's own client against the real model, and its types against what the server writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import accumulate
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from pydantic import TypeAdapter

from tests.served.conftest import QUEUE, SEATS
from tests.served.process import MODEL, PATIENCE, Served
from tests.served.talk import TEXT, Ask, chat, complete, idle, metrics

pytestmark = pytest.mark.slow

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


@pytest.fixture
def sync(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def test_models(sync: OpenAI) -> None:
    (model,) = sync.models.list()
    assert model == sync.models.retrieve(MODEL)
    assert (model.id, model.owned_by) == (MODEL, "chairlift")


def test_chat_whole_and_streamed(sync: OpenAI) -> None:
    answer = sync.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (PARIS, "assistant", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)
    assert answer.usage.total_tokens == 45
    stream = sync.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == PARIS
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], answer.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_messages_reach_the_model_in_whatever_form(sync: OpenAI) -> None:
    def ask(*messages: ChatCompletionMessageParam) -> tuple[str | None, int]:
        answer = sync.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        assert answer.usage
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    question = "What is the capital of France?"
    plain = ask({"role": "system", "content": "Answer in French."}, {"role": "user", "content": question})
    in_parts = ask(
        {"role": "developer", "content": [{"type": "text", "text": "Answer in French."}]},
        {"role": "user", "content": [{"type": "text", "text": question}]},
    )
    assert in_parts == plain
    assert plain != ask({"role": "user", "content": question})
    later = ask(
        {"role": "user", "content": question},
        {"role": "assistant", "content": "Paris."},
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "And of Italy?"},
    )
    assert later[1] > plain[1]


def test_completions(sync: OpenAI) -> None:
    (prompt, tokens) = "The capital of France is", [504, 3575, 282, 4649, 314]
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    text = sync.completions.create(prompt=prompt, **ask).choices[0].text
    assert text.startswith(" Paris")
    assert sync.completions.create(prompt=tokens, **ask).choices[0].text == text
    both = sync.completions.create(prompt=[prompt, "One, two, three,"], echo=True, **ask)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == prompt + text
    assert both.choices[1].text.startswith("One, two, three, four")
    assert both.usage and both.usage.completion_tokens == 8
    assert sync.completions.create(prompt=[tokens, tokens], echo=True, **ask).choices[1].text == prompt + text
    stream = sync.completions.create(prompt=[prompt, prompt], echo=True, stream=True, **ask)
    streamed = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == {0: prompt + text, 1: prompt + text}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("is Par", "The capital of France "),
        (["nowhere", "pital", "capital of"], "The ca"),
        ("The", ""),
        ("T", ""),
        (["Paris.!", "."], "The capital of France is Paris"),
        ("Lyon", PARIS),
    ],
    ids=["across tokens", "inside a token", "the first token", "in the first token", "last", "never"],
)
def test_stop_strings(sync: OpenAI, stop: str | list[str], text: str) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "stop": stop}
    (choice,) = sync.chat.completions.create(**ask).choices
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    chunks = list(sync.chat.completions.create(stream=True, **ask))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_chat(sync: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 7}
    answer = sync.chat.completions.create(logprobs=True, top_logprobs=3, **ask)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert "".join(entry.token for entry in entries) == PARIS
    for entry in entries:
        assert entry.bytes == list(entry.token.encode())
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry.top_logprobs[0].token == entry.token
        assert tops[0] == pytest.approx(entry.logprob, abs=1e-5)
        assert entry.logprob <= 0
    assert entries[1].logprob > -0.1  # after 'The': there is hardly another word than ' capital'
    stream = sync.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **ask)
    logprobs = [chunk.choices[0].logprobs for chunk in stream]
    again = [entry for part in logprobs if part for entry in part.content or []]
    assert [entry.token for entry in again] == [entry.token for entry in entries]
    assert [entry.logprob for entry in again] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    plain = sync.chat.completions.create(logprobs=True, **ask).choices[0].logprobs
    assert plain and plain.content and plain.content[0].top_logprobs == []


def test_logprobs_of_completions(sync: OpenAI) -> None:
    answer = sync.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=3, logprobs=2
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [0, *accumulate(map(len, logprobs.tokens[:-1]))]
    assert logprobs.token_logprobs is not None and len(logprobs.token_logprobs) == 3
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert max(top, key=lambda text: top[text]) == token
        assert top[token] == pytest.approx(logprob, abs=1e-5)


def test_a_prompt_scores_what_was_drawn_behind_it(sync: OpenAI) -> None:
    """A greedy answer sent back as a part of the prompt has the log probabilities with which it was drawn."""
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 1}
    prompt = "The capital of France is"
    (drawn,) = sync.completions.create(prompt=prompt, max_tokens=12, **asked).choices
    (echoed,) = sync.completions.create(prompt=prompt + drawn.text, max_tokens=0, echo=True, **asked).choices
    assert drawn.logprobs and drawn.logprobs.tokens and drawn.logprobs.token_logprobs
    assert echoed.logprobs and echoed.logprobs.tokens and echoed.logprobs.token_logprobs
    assert echoed.text == prompt + drawn.text == "".join(echoed.logprobs.tokens)
    count = len(drawn.logprobs.tokens)
    assert echoed.logprobs.tokens[-count:] == drawn.logprobs.tokens
    assert echoed.logprobs.token_logprobs[-count:] == pytest.approx(drawn.logprobs.token_logprobs, abs=1e-3)
    assert echoed.logprobs.token_logprobs[0] is None


async def test_asynchronous_all_at_once(sdk: AsyncOpenAI) -> None:
    async def whole() -> str | None:
        answer = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        return answer.choices[0].message.content

    async def streamed() -> str:
        stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def helped() -> str | None:
        async with sdk.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
            return (await stream.get_final_completion()).choices[0].message.content

    assert await asyncio.gather(*(ask() for ask in (whole, streamed, helped) * 2)) == [PARIS] * 6


async def test_closing_a_stream_cancels(sdk: AsyncOpenAI, client: httpx.AsyncClient) -> None:
    before = await metrics(client)
    stream = await sdk.completions.create(
        model=MODEL, prompt="Hello", stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await stream.close()
    await idle(client)  # long before 8000 tokens
    assert (await metrics(client))["ended_abort"] == before["ended_abort"] + 1


async def test_refusals(sdk: AsyncOpenAI) -> None:
    create = sdk.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as empty:
        await create(model=MODEL, messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as long:
        await sdk.completions.create(model=MODEL, prompt="word " * 9000)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as unbuilt:
        await create(model=MODEL, messages=MESSAGES, modalities=["audio"], max_tokens=1)
    assert (unbuilt.value.param, unbuilt.value.code) == ("modalities", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4o", messages=MESSAGES)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="makes no embeddings") as generates:
        await sdk.embeddings.create(model=MODEL, input="Hi")
    assert generates.value.param == "model"
    with pytest.raises(openai.RateLimitError) as full:
        await sdk.completions.create(model=MODEL, prompt=["Hi"] * (SEATS + QUEUE + 1))
    assert full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after"]) >= 1


async def test_a_full_queue_refuses_and_recovers(sdk: AsyncOpenAI, client: httpx.AsyncClient) -> None:
    await idle(client)
    stream = await sdk.completions.create(
        model=MODEL, prompt=["Hi"] * (SEATS + QUEUE), stream=True, max_tokens=100, temperature=0
    )
    await anext(stream)
    with pytest.raises(openai.RateLimitError):
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    await stream.close()
    answer = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, temperature=0)
    assert answer.choices[0].message.content == "The"


@pytest.mark.parametrize(
    ("ask", "whole", "chunk"),
    [
        (chat("Hi", max_tokens=6, logprobs=True, top_logprobs=2), ChatCompletion, ChatCompletionChunk),
        (chat("Hi", max_tokens=3), ChatCompletion, ChatCompletionChunk),
        (complete(["Hi", TEXT[:50]], max_tokens=4, logprobs=2), Completion, Completion),
        (complete("Hi", max_tokens=2, echo=True), Completion, Completion),
    ],
)
async def test_every_byte_passes_the_clients_types(
    client: httpx.AsyncClient, ask: Ask, whole: type[object], chunk: type[object]
) -> None:
    """Strictly, which the client itself does not do; and it knows every field.

    One leave: its `Completion`, which it also takes for a chunk of a stream, has no null `finish_reason`, as
    OpenAI's service and everyone else send it until the last.
    """
    answer = await client.post(ask.path, json=ask.body)
    known(TypeAdapter(whole).validate_json(answer.content, strict=True))
    streamed = await client.post(ask.path, json=ask.streamed().body)
    *events, end = streamed.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    adapter = TypeAdapter(chunk)
    for event in events:
        payload = event.removeprefix("data: ")
        if chunk is Completion:
            payload = payload.replace('"finish_reason":null', '"finish_reason":"stop"')
        known(adapter.validate_json(payload, strict=True))


def known(value: object) -> None:
    """No field that the client's type does not have."""
    assert not getattr(value, "model_extra", None), value
