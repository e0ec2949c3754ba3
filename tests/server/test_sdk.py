"""OpenAI's own client, synchronous, asynchronous and streaming, over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from chairlift.engine.engine import EngineConfig
from chairlift.engine.request import Request
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import MODEL, Lift, lift, on_socket

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def client_of(server: Lift) -> AsyncIterator[AsyncOpenAI]:
    async with (
        on_socket(server.app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_synchronous() -> None:
    def use(url: str) -> None:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).owned_by == "chairlift"
            answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert answer.choices[0].message.content == "bonjour"
            assert answer._request_id == answer.id
            text = ""
            for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == "bonjour"
            completion = client.completions.create(model=MODEL, prompt=["a", "b"], echo=True)
            assert [choice.text for choice in completion.choices] == ["abonjour", "bbonjour"]
            extra = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=3, extra_body={"top_k": 5, "ignore_eos": True}
            )
            assert extra.choices[0].finish_reason == "length"

    async with lift(FakeRunner(answering("bonjour"))) as server, on_socket(server.app) as url:
        await asyncio.to_thread(use, url)


async def test_asynchronous_at_once() -> None:
    async with lift(FakeRunner(answering("bonjour"))) as server, client_of(server) as client:

        async def whole() -> str | None:
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            return answer.choices[0].message.content

        async def streamed() -> str:
            stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def helped() -> str | None:
            manager = client.chat.completions.stream(
                model=MODEL, messages=MESSAGES, stream_options={"include_usage": True}
            )
            async with manager as stream:
                completion = await stream.get_final_completion()
            assert completion.usage and completion.usage.completion_tokens == 8
            return completion.choices[0].message.content

        answers = await asyncio.gather(*(ask() for ask in (whole, streamed, helped) * 10))
    assert answers == ["bonjour"] * 30


async def test_closing_a_stream_cancels() -> None:
    async with lift() as server, client_of(server) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, max_tokens=4000
        )
        await anext(stream)
        await stream.close()
        async with asyncio.timeout(10):
            while server.engine.stats().running:
                await asyncio.sleep(0)
        assert server.engine.stats().generation_tokens < 4000


async def test_refusals_are_the_clients_own_exceptions() -> None:
    config = EngineConfig(max_num_seqs=1, max_waiting=0)
    async with lift(config=config) as server, client_of(server) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=MESSAGES, temperature=9)
        assert bad.value.param == "temperature"
        assert bad.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError) as unsupported:
            await create(model=MODEL, messages=MESSAGES, modalities=["text", "audio"])
        assert (unsupported.value.param, unsupported.value.code) == ("modalities", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        assert missing.value.request_id and missing.value.request_id != unsupported.value.request_id
        server.runner.close_gate()
        async with server.engine.submit(Request("one", (97,))):
            with pytest.raises(openai.RateLimitError) as full:
                await create(model=MODEL, messages=MESSAGES)
            assert full.value.code == "queue_full"
            server.runner.open_gate()


async def test_a_failure_in_mid_stream_is_raised() -> None:
    faults = iter((None, None, Fault(fail=all_rows)))
    async with lift() as server, client_of(server) as client:
        server.runner.fault = lambda plan: next(faults, None)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as error:
            async for _ in stream:
                pass
    assert error.value.code == "engine_error"
