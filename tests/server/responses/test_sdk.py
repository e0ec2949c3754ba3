"""OpenAI's own client on `/v1/responses`, synchronous, asynchronous and streaming, over a socket."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseInputItemParam

from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import MODEL, lift, on_socket
from tests.server.responses.asking import Recorder
from tests.server.test_sdk import client_of


async def test_synchronous() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server, on_socket(server.app) as url:

        def ask() -> list[str]:
            with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                response = client.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
                streamed = client.responses.create(model=MODEL, input="Hi", stream=True)
                deltas = [event.delta for event in streamed if event.type == "response.output_text.delta"]
                with client.responses.stream(model=MODEL, input="Hi") as stream:
                    for _ in stream:
                        pass
                    final = stream.get_final_response()
                kept = client.responses.retrieve(response.id)
                assert kept == response
                client.responses.delete(response.id)
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(response.id)
                return [response.output_text, "".join(deltas), final.output_text]

        assert await asyncio.to_thread(ask) == ["Hello!"] * 3


async def test_create_and_go_on() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server, client_of(server) as client:
        first = await client.responses.create(model=MODEL, input="Hi", metadata={"a": "b"})
        assert (first.output_text, first.status, first.metadata) == ("Hello!", "completed", {"a": "b"})
        assert first.usage is not None and first.usage.output_tokens == 7
        second = await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        assert second.usage is not None and second.usage.input_tokens > first.usage.input_tokens
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.type for item in items] == ["message"] * 3


async def test_counting_tokens() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server, client_of(server) as client:
        asked = await client.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
        count = client.responses.input_tokens.count
        counted = await count(model=MODEL, input="Hi", instructions="Be kind.", previous_response_id=None)
        assert asked.usage is not None and counted.input_tokens == asked.usage.input_tokens
        followed = await count(model=MODEL, input="And?", previous_response_id=asked.id)
        assert followed.input_tokens > counted.input_tokens
        with pytest.raises(openai.BadRequestError) as bad:
            await count(model=MODEL, input="Hi", personality="friendly")
        assert bad.value.param == "personality"


async def test_an_answer_sent_back_as_it_came() -> None:
    tokenizer = Recorder()
    async with (
        lift(FakeRunner(answering("Hello!")), tokenizer=tokenizer) as server,
        client_of(server) as client,
    ):
        first = await client.responses.create(model=MODEL, input="Hi", store=False)
        history: list[ResponseInputItemParam] = [{"role": "user", "content": "Hi"}]
        history += first.output  # type: ignore[arg-type]
        history.append({"role": "user", "content": "And?"})
        await client.responses.create(model=MODEL, input=history, store=False)
    assert [(m["role"], m["content"]) for m in tokenizer.conversations[-1]] == [
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "And?"),
    ]


async def test_the_streaming_helper() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server, client_of(server) as client:
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
        assert snapshots == sorted(snapshots, key=len) and snapshots[-1] == "Hello!"
        assert final.output_text == "Hello!"
        assert final.id == (await client.responses.retrieve(final.id)).id


async def test_background_polled_streamed_again_and_cancelled() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server, client_of(server) as client:
        response = await client.responses.create(model=MODEL, input="Hi", background=True)
        async with asyncio.timeout(10):
            while response.status in ("queued", "in_progress"):
                response = await client.responses.retrieve(response.id)
        assert response.output_text == "Hello!"
        stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
        events = [event async for event in stream]
        assert events[0].type == "response.created"
        again = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=3)
        assert [event async for event in again] == events[4:]
        async with client.responses.stream(response_id=events[0].response.id) as helper:
            assert (await helper.get_final_response()).output_text == "Hello!"
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            await client.responses.cancel(response.id)
    async with lift() as server, client_of(server) as client:
        running = await client.responses.create(
            model=MODEL, input="Hi", background=True, max_output_tokens=4000
        )
        assert (await client.responses.cancel(running.id)).status == "cancelled"


async def test_refusals_are_the_clients_own_exceptions() -> None:
    async with lift() as server, client_of(server) as client:
        create = client.responses.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, input="Hi", temperature=9)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as lost:
            await create(model=MODEL, input="Hi", previous_response_id="resp_0")
        assert lost.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError) as unsupported:
            await create(model=MODEL, input="Hi", conversation="conv_1")
        assert (unsupported.value.param, unsupported.value.code) == (
            "conversation",
            "unsupported_parameter",
        )
        with pytest.raises(openai.NotFoundError):
            await create(model="other", input="Hi")


async def test_a_failure_in_mid_stream_is_told() -> None:
    faults = iter((None, None, Fault(fail=all_rows)))
    async with lift() as server, client_of(server) as client:
        server.runner.fault = lambda plan: next(faults, None)
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert events[-1].response.error.message == "The fake failed this row."
