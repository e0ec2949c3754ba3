"""Anthropic's own client: synchronous, asynchronous, streaming, its helpers, over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageParam

from chairlift.engine.engine import EngineConfig
from chairlift.engine.request import Request
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import MODEL, Lift, lift, on_socket, sse

HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def client_of(server: Lift) -> AsyncIterator[AsyncAnthropic]:
    async with (
        on_socket(server.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def synchronously(server: Lift, use: Callable[[Anthropic], None]) -> None:
    def run(url: str) -> None:
        with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            use(client)

    async with on_socket(server.app) as url:
        await asyncio.to_thread(run, url)


async def test_synchronous() -> None:
    def use(client: Anthropic) -> None:
        message = client.messages.create(model=MODEL, max_tokens=100, messages=HI)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].type == "text" and message.content[0].text == "bonjour"
        assert (message.role, message.model, message.type) == ("assistant", MODEL, "message")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.usage.output_tokens == 8
        assert message._request_id and message._request_id.startswith("req_")

        kinds = []
        for event in client.messages.create(model=MODEL, max_tokens=100, messages=HI, stream=True):
            kinds.append(event.type)
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}

        with client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
            assert "".join(stream.text_stream) == "bonjour"
            final = stream.get_final_message()
        assert final.usage == message.usage
        assert final.content[0].type == "text" and final.content[0].text == "bonjour"

        count = client.messages.count_tokens(model=MODEL, messages=HI)
        assert count.input_tokens == message.usage.input_tokens

    async with lift(FakeRunner(answering("bonjour"))) as server:
        await synchronously(server, use)


async def test_asynchronous_at_once() -> None:
    async with lift(FakeRunner(answering("bonjour"))) as server, client_of(server) as client:

        async def whole() -> Message:
            return await client.messages.create(model=MODEL, max_tokens=100, messages=HI)

        async def streamed() -> Message:
            snapshot: Message | None = None
            async for event in await client.messages.create(
                model=MODEL, max_tokens=100, messages=HI, stream=True
            ):
                snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs={})  # type: ignore[arg-type]
            assert snapshot is not None
            return snapshot

        async def helped() -> Message:
            async with client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
                return await stream.get_final_message()

        answers = await asyncio.gather(*(ask() for ask in (whole, streamed, helped) * 8))
    for message in answers:
        (block,) = message.content
        assert block.type == "text" and block.text == "bonjour"
        assert message.stop_reason == "end_turn"
    assert len({message.id for message in answers}) == len(answers)


async def test_the_beta_client() -> None:
    async with lift(FakeRunner(answering("bonjour"))) as server, client_of(server) as client:
        message = await client.beta.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=[{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}],
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        )
        assert message.context_management is not None
        assert message.context_management.applied_edits == []
        count = await client.beta.messages.count_tokens(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}],
            context_management={"edits": []},
        )
        assert count.input_tokens == message.usage.input_tokens
        assert count.context_management is not None
        assert count.context_management.original_input_tokens == count.input_tokens


async def test_where_an_answer_ends() -> None:
    async with lift(FakeRunner(answering("one END two"))) as server, client_of(server) as client:
        stopped = await client.messages.create(
            model=MODEL, max_tokens=100, messages=HI, stop_sequences=["no", "END"]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
        assert stopped.content[0].type == "text" and stopped.content[0].text == "one "
        cut = await client.messages.create(model=MODEL, max_tokens=3, messages=HI)
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        assert cut.usage.output_tokens == 3
        async with client.messages.stream(
            model=MODEL, max_tokens=100, messages=HI, stop_sequences=["END"]
        ) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "END")
        assert final.usage == stopped.usage


async def test_closing_a_stream_cancels() -> None:
    async with lift() as server, client_of(server) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=4000, messages=HI, stream=True)
        await anext(stream)
        await stream.close()
        async with asyncio.timeout(10):
            while server.engine.stats().running:
                await asyncio.sleep(0)
        assert server.engine.stats().generation_tokens < 4000


async def test_refusals_are_the_clients_own_exceptions() -> None:
    config = EngineConfig(max_num_seqs=1, max_waiting=0)
    async with lift(config=config) as server, client_of(server) as client:
        create = client.messages.create
        with pytest.raises(anthropic.BadRequestError) as bad:
            await create(model=MODEL, max_tokens=5, messages=HI, extra_body={"temperature": 9})
        assert bad.value.type == "invalid_request_error"
        assert "temperature" in str(bad.value.body)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await create(model="other", max_tokens=5, messages=HI)
        assert missing.value.type == "not_found_error"
        assert missing.value.request_id
        with pytest.raises(anthropic.BadRequestError) as long:
            await create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "a" * 5000}])
        assert "context" in str(long.value.body)
        server.runner.close_gate()
        async with server.engine.submit(Request("one", (97,))):
            with pytest.raises(anthropic.RateLimitError) as full:
                await create(model=MODEL, max_tokens=5, messages=HI)
            assert full.value.type == "rate_limit_error"
            server.runner.open_gate()
        await server.engine.stop()
        with pytest.raises(anthropic.OverloadedError) as stopped:
            await create(model=MODEL, max_tokens=5, messages=HI)
        assert stopped.value.type == "overloaded_error"


async def test_a_failure_in_mid_stream_is_raised() -> None:
    faults = iter((None, None, Fault(fail=all_rows)))
    async with lift() as server, client_of(server) as client:
        server.runner.fault = lambda plan: next(faults, None)
        stream = await client.messages.create(model=MODEL, max_tokens=4000, messages=HI, stream=True)
        kinds = []
        with pytest.raises(anthropic.APIStatusError) as error:
            async for event in stream:
                kinds.append(event.type)
        assert error.value.type == "api_error"
        assert kinds[0] == "message_start" and "message_stop" not in kinds
        await server.until_idle()
        assert await server.metric('request_success_total{finished_reason="error"}') == 1


async def test_models() -> None:
    async with lift() as server, client_of(server) as client:
        page = await client.models.list()
        assert [model.id for model in page.data] == [MODEL]
        assert [model.id async for model in client.models.list(limit=1)] == [MODEL]
        assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
        model = await client.models.retrieve(MODEL)
        assert model == page.data[0]
        assert (model.type, model.display_name, model.lifecycle) == ("model", MODEL, "active")
        assert model.created_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        assert model.max_input_tokens == 4096
        assert (await client.models.list(after_id=MODEL)).data == []
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("claude")
        assert missing.value.type == "not_found_error"


async def test_pings_keep_a_silent_stream_open() -> None:
    runner = FakeRunner(answering("ab"))
    async with lift(runner, settings=ServerSettings(ping_s=0.01)) as server, on_socket(server.app) as url:
        runner.close_gate()
        body = {"model": MODEL, "max_tokens": 9, "messages": HI, "stream": True}
        text = ""
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", "/v1/messages", json=body) as response,
        ):
            async for piece in response.aiter_text():
                text += piece
                if text.count("event: ping") == 3:
                    runner.open_gate()
        names = [name for name, _ in sse(text)]
        assert names[:4] == ["message_start", "ping", "ping", "ping"]
        assert names[-1] == "message_stop"
        assert {data for name, data in sse(text) if name == "ping"} == {'{"type":"ping"}'}
