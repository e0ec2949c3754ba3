"""A client that leaves cancels its requests, streamed or not, wherever they are. Over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from chairlift.engine.engine import EngineConfig
from chairlift.engine.output.plain import PlainParser
from chairlift.engine.output.stream import parsed
from chairlift.engine.request import Request, SamplingParams
from chairlift.server.streaming import EventStream, chunks, merge
from tests.fakes import FakeRunner
from tests.server.harness import CHAT, COMPLETIONS, JSON, Lift, chat_body, completion_body, lift, on_socket


class Client:
    """One raw connection, which leaves without a word."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, path: str, body: JSON) -> None:
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(raw)}\r\n\r\n"
        self.writer.write(head.encode() + raw)
        await self.writer.drain()

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[Client]:
    address = httpx.URL(url)
    client = Client(*await asyncio.open_connection(address.host, address.port))
    try:
        yield client
    finally:
        await client.leave()


async def running(server: Lift, count: int) -> None:
    async with asyncio.timeout(10):
        while server.engine.stats().running < count:
            await asyncio.sleep(0)


async def ended(server: Lift, count: int) -> None:
    """Wait until so many requests were aborted."""
    async with asyncio.timeout(10):
        while sum(server.engine.stats().finished.values()) < count:
            await asyncio.sleep(0)
    aborted = await server.metric('request_success_total{finished_reason="abort"}')
    assert aborted == count


ENDLESS: JSON = {"max_tokens": 4000}


@pytest.mark.parametrize("stream", [False, True])
async def test_in_mid_decode_it_is_cancelled_within_one_step(stream: bool) -> None:
    async with lift() as server, on_socket(server.app) as url:
        async with connection(url) as client:
            await client.send(CHAT, chat_body(stream=stream, **ENDLESS))
            await running(server, 1)
            server.runner.close_gate()
            await server.runner.at_gate()
        # Gone while a step runs. Nothing but the loop and that one step may be needed to notice.
        await ended(server, 1)
        steps = len(server.runner.plans)
        server.runner.open_gate()
        await server.until_idle()
        assert [plan.idle for plan in server.runner.plans[steps:]].count(False) <= 1
        assert server.runner.rows == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_while_waiting_in_the_queue(stream: bool) -> None:
    config = EngineConfig(max_num_seqs=1)
    async with lift(config=config) as server, on_socket(server.app) as url:
        async with connection(url) as first:
            await first.send(CHAT, chat_body(**ENDLESS))
            await running(server, 1)
            server.runner.close_gate()
            await server.runner.at_gate()
            async with connection(url) as second:
                await second.send(CHAT, chat_body(stream=stream, **ENDLESS))
                async with asyncio.timeout(10):
                    while server.engine.stats().waiting < 1:
                        await asyncio.sleep(0)
            await ended(server, 1)
            assert server.engine.stats().waiting == 0
            server.runner.open_gate()
        await ended(server, 2)
        await server.until_idle()
        assert server.runner.rows == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_is_cancelled(stream: bool) -> None:
    async with lift() as server, on_socket(server.app) as url:
        async with connection(url) as client:
            body = completion_body(prompt=["a", "b", "c"], stream=stream, **ENDLESS)
            await client.send(COMPLETIONS, body)
            await running(server, 3)
        await ended(server, 3)
        await server.until_idle()
        assert server.runner.rows == {}
        assert await server.metric("num_requests_running") == 0
        assert await server.metric("kv_cache_bytes") == 0


async def test_in_the_middle_of_its_own_body(caplog: pytest.LogCaptureFixture) -> None:
    async with lift() as server, on_socket(server.app) as url:
        async with connection(url) as client:
            client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{")
            await client.writer.drain()
        async with httpx.AsyncClient(base_url=url) as other:
            assert (await other.get("/health")).json()["running"] == 0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_slow_reader_holds_nobody_up_and_gets_everything() -> None:
    async with lift() as server, on_socket(server.app) as url:
        async with connection(url) as slow:
            await slow.send(CHAT, chat_body(stream=True, max_tokens=3000))
            async with httpx.AsyncClient(base_url=url, timeout=60) as other:
                response = await other.post(CHAT, json=chat_body(max_tokens=5))
                whole = await other.post(CHAT, json=chat_body(max_tokens=3000))
            assert response.json()["usage"]["completion_tokens"] == 5
            received = b""
            async with asyncio.timeout(10):
                while b"[DONE]" not in received:
                    received += await slow.reader.read(2**16)
        lines = received.decode().replace("\r\n", "\n").split("\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == whole.json()["choices"][0]["message"]["content"]


async def test_many_clients_come_and_go_and_nothing_is_left() -> None:
    async with lift(config=EngineConfig(max_num_seqs=4)) as server, on_socket(server.app) as url:

        async def visit(number: int) -> None:
            async with connection(url) as client:
                body = chat_body(stream=number % 2 == 0, max_tokens=50 + number)
                await client.send(CHAT, body)
                if number % 3:
                    await client.reader.read(1)

        await asyncio.gather(*(visit(number) for number in range(40)))
        registry = server.app.state.context.metrics.registry
        name, labels = "chairlift_http_requests_total", {"route": CHAT, "method": "POST"}
        statuses = ("200", "499")  # who leaves before the body is read gets no further

        def answered() -> float:
            found = (registry.get_sample_value(name, {**labels, "status": status}) for status in statuses)
            return sum(count or 0.0 for count in found)

        async with asyncio.timeout(10):
            while answered() < 40:
                await asyncio.sleep(0)
        await server.until_idle()
        stats = server.engine.stats()
        assert sum(stats.finished.values()) >= 26  # who reads something has got that far
        assert (stats.running, stats.waiting, stats.runner.kv_bytes) == (0, 0, 0)
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post(CHAT, json=chat_body(max_tokens=3))
        assert response.json()["usage"]["completion_tokens"] == 3


async def test_a_stream_that_never_starts_is_cancelled_too() -> None:
    async with lift() as server:
        server.runner.close_gate()
        handle = server.engine.submit(Request("one", (97,)))
        answers = [parsed(handle, PlainParser())]
        stream = EventStream(answers, chunks(answers, encoder=None), headers={}, ping_s=15)  # type: ignore[arg-type]

        async def gone() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            raise OSError("gone")

        with pytest.raises(OSError):
            await stream({"type": "http", "method": "POST"}, gone, send)
        server.runner.open_gate()
        await ended(server, 1)


async def test_a_stream_leaves_no_task_behind() -> None:
    """Upstream's watcher for shutdown would go on polling for the life of the process."""
    async with lift() as server:
        before = asyncio.all_tasks()
        await server.chat(stream=True, max_tokens=2)
        await server.complete(prompt=["a", "b"], stream=True, max_tokens=2)
        await server.complete(prompt=["a", "b"], max_tokens=2)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


async def test_merge_takes_no_event_ahead_of_its_reader() -> None:
    async with lift(FakeRunner()) as server:
        sampling = SamplingParams(max_tokens=50, temperature=0)
        handles = [server.engine.submit(Request(str(i), (97 + i,), sampling)) for i in range(2)]
        events = merge([parsed(handle, PlainParser()) for handle in handles])
        await anext(events)
        await server.until_idle()
        rest = [event async for event in events]
        # Whatever was drawn meanwhile came joined: what each handle had handed out, the rest, the end.
        assert len(rest) <= 6
