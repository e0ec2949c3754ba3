"""One line for every request, whatever became of it."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace

import httpx
import pytest

from chairlift.engine.config import EngineConfig
from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.settings import ServerSettings
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import CHAT, MODEL, chat_body, completion_body, lift, on_socket, stream_of
from tests.server.observe.reading import LOGGING, request_lines

SECRET = "the moon is made of cheese"


async def test_a_chat() -> None:
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        with request_lines() as seen:
            answer = await server.chat()
    (line,) = seen.lines
    assert seen.levels == [logging.INFO]
    usage = answer.json()["usage"]
    assert line.pop("request_id") == answer.json()["id"] == answer.headers["x-request-id"]
    times = [line.pop(name) for name in ("queue_s", "ttft_s", "itl_s", "total_s")]
    assert all(isinstance(time, float) and time >= 0 for time in times)
    assert times[0] <= times[1] <= times[3]
    assert line == {
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "client": "127.0.0.1",
        "model": MODEL,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": 0,
        "output_tokens": 4,
        "finish_reason": "stop",
    }


async def test_streams_and_several_answers() -> None:
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        with request_lines() as seen:
            stream_of(await server.chat(stream=True))
            await server.complete(prompt=["1", "123"], n=2, max_tokens=2)
    first, second = seen.lines
    assert (first["stream"], first["output_tokens"]) == (True, 4)
    assert "stream" not in second
    assert (second["answers"], second["prompt_tokens"], second["output_tokens"]) == (4, 4, 8)
    assert second["finish_reason"] == "length"


async def test_what_is_refused() -> None:
    async with lift(settings=LOGGING) as server:
        with request_lines() as seen:
            await server.client.get("/nowhere%0Aelse")
            await server.client.post("/v1/models")
            await server.chat(temperature=SECRET)
            await server.chat(model=SECRET)
            await server.client.post(CHAT, content=SECRET)
    told = [(line["status"], line.get("route"), line["error"]) for line in seen.lines]
    assert told == [
        (404, None, "unknown_url"),
        (405, "/v1/models", "method_not_allowed"),
        (400, CHAT, "invalid_type"),
        (404, CHAT, "model_not_found"),
        (400, CHAT, "invalid_json"),
    ]
    assert seen.lines[0]["path"] == "/nowhere\\nelse"
    assert seen.lines[2]["error_param"] == "temperature"
    assert SECRET not in str(seen.lines)


async def test_what_the_server_cannot_do_is_told_with_its_reason() -> None:
    runner = FakeRunner()
    async with lift(runner, config=EngineConfig(max_num_seqs=1, max_waiting=0), settings=LOGGING) as server:
        await server.until_idle()
        runner.close_gate()
        with request_lines() as seen:
            first = asyncio.create_task(server.chat(max_tokens=2))
            await runner.at_gate()
            assert (await server.chat()).status_code == 429
            runner.open_gate()
            await first
            runner.fail_next(Fault(fail=all_rows))
            assert (await server.chat()).status_code == 500
            runner.fail_next(Fault(fail=all_rows))
            assert (await server.chat(stream=True)).status_code == 200
    busy, _, failed, broken_off = seen.lines
    assert (busy["status"], busy["error"]) == (429, "queue_full")
    assert str(busy["error_message"]).startswith("The server is busy")
    assert (failed["status"], failed["finish_reason"], failed["error"]) == (500, "error", "engine_error")
    assert (broken_off["status"], broken_off["finish_reason"]) == (200, "error")
    assert broken_off["error_message"] == failed["error_message"]
    assert seen.levels == [logging.INFO, logging.INFO, logging.WARNING, logging.WARNING]


class Broken(FakeTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RuntimeError(text)


async def test_what_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    async with lift(settings=LOGGING, tokenizer=FakeTokenizer()) as server:
        server.tokenizer.__class__ = Broken
        with request_lines() as seen:
            answer = await server.complete(prompt=SECRET)
    (line,) = seen.lines
    assert (line["status"], line["error"]) == (500, "internal_error")
    assert line["request_id"] == answer.headers["x-request-id"]
    assert str(line["request_id"]) in caplog.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves(stream: bool) -> None:
    runner = FakeRunner()
    async with lift(runner, settings=LOGGING) as server, on_socket(server.app) as url:
        with request_lines() as seen:
            await server.until_idle()
            runner.close_gate()
            async with httpx.AsyncClient() as client:
                asking = asyncio.create_task(client.post(url + CHAT, json=chat_body(stream=stream)))
                await runner.at_gate()
                asking.cancel()
                await asyncio.wait({asking})
            async with asyncio.timeout(10):
                while not seen.lines:
                    await asyncio.sleep(0)
            runner.open_gate()
        abandoned = await server.metric(f'http_requests_abandoned_total{{route="{CHAT}"}}')
    (line,) = seen.lines
    assert (line["disconnected"], line["finish_reason"], line["output_tokens"]) == (True, "abort", 0)
    assert line["status"] == (200 if stream else 499)
    assert abandoned == 1


async def test_an_answer_in_the_background_is_told_when_it_is_there() -> None:
    runner = FakeRunner(answering("abc"))
    async with lift(runner, settings=LOGGING) as server:
        await server.until_idle()
        runner.close_gate()
        with request_lines() as seen:
            asked = {"model": MODEL, "input": "Hi", "background": True}
            answer = await server.client.post("/v1/responses", json=asked)
            assert answer.status_code == 200 and seen.lines == []
            runner.open_gate()
            await server.until_idle()
    (line,) = seen.lines
    assert (line["route"], line["output_tokens"], line["finish_reason"]) == ("/v1/responses", 4, "stop")
    assert line["request_id"] == answer.json()["id"]


async def test_bodies_are_told_only_if_asked() -> None:
    asks = ServerSettings(observe=replace(LOGGING.observe, log_prompts=True))
    for settings in (LOGGING, asks, ServerSettings(observe=ObserveSettings(log_prompts=True))):
        async with lift(FakeRunner(answering("abc")), settings=settings) as server:
            with request_lines() as seen:
                await server.complete(prompt=SECRET)
                await server.complete(prompt=SECRET, stop=5)
        if settings.observe.access_log:
            assert len(seen.lines) == 2
            bodies = [SECRET in str(line.get("body")) for line in seen.lines]
            assert bodies == [settings.observe.log_prompts] * 2
        else:
            assert seen.lines == []


async def test_what_machines_ask_for_all_the_time() -> None:
    async with lift(settings=LOGGING) as server:
        for level, lines in ((logging.INFO, 1), (logging.DEBUG, 4)):
            with request_lines(level) as seen:
                for path in ("/health", "/health/ready", "/metrics", "/v1/models"):
                    await server.client.get(path)
            assert len(seen.lines) == lines


async def test_what_is_no_http() -> None:
    async with lift(settings=LOGGING) as server, on_socket(server.app) as url:
        with request_lines() as seen:
            address = httpx.URL(url)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"up we go\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            writer.close()
            await writer.wait_closed()
    shown = re.search(rb"x-request-id: (\S+)", answer)
    assert shown is not None
    told = {"status": 400, "error": "invalid_http", "client": "127.0.0.1"}
    assert seen.lines == [{"request_id": shown[1].decode(), **told}]


async def test_http_is_counted() -> None:
    async with lift(FakeRunner(answering("abc"))) as server:
        await server.chat()
        await server.complete(prompt=["1", "123"], n=3)
        await server.client.get("/v1/models/a/b")
        await server.client.get("/v1/models/c")
        await server.client.get("/nowhere")
        await server.client.request("BREW", "/v1/models")
        count = "http_requests_total"
        assert await server.metric(f'{count}{{method="POST",route="{CHAT}",status="200"}}') == 1
        models = "/v1/models/{model_id:path}"
        assert await server.metric(f'{count}{{method="GET",route="{models}",status="404"}}') == 2
        assert await server.metric(f'{count}{{method="GET",route="other",status="404"}}') == 1
        assert await server.metric(f'{count}{{method="other",route="/v1/models",status="405"}}') == 1
        assert await server.metric('requests_refused_total{reason="model_not_found"}') == 2
        assert await server.metric('requests_refused_total{reason="unknown_url"}') == 1
        seconds = f'http_request_duration_seconds_count{{method="POST",route="{CHAT}"}}'
        assert await server.metric(seconds) == 1
        assert await server.metric("http_requests_in_progress") == 1  # this one
        assert await server.metric("request_params_n_count") == 1 + 2
        assert await server.metric("request_params_n_sum") == 1 + 3 + 3
        assert await server.metric("request_max_num_generation_tokens_sum") == 4 + 4 + 4


def test_the_bodies_of_tests_hold_no_secret() -> None:
    assert SECRET not in str(chat_body()) + str(completion_body())
