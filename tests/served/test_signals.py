"""Leaving in good order with a real model in mid-answer, and not coming up at all."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.served.process import COMMAND, MODEL, PATIENCE, serving
from tests.served.talk import complete

pytestmark = pytest.mark.slow


def sdk(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


async def test_running_answers_finish_and_it_leaves_with_0() -> None:
    with serving("--drain-timeout", "100", "--max-num-seqs", "3") as server:
        async with sdk(server.url) as client, httpx.AsyncClient(base_url=server.url) as plain:
            ask = complete("Once upon a time", max_tokens=24, ignore_eos=True)
            streams = [
                await client.completions.create(
                    model=MODEL,
                    prompt="Once upon a time",
                    max_tokens=24,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(2)
            ]
            begun = [(await anext(stream)).choices[0].text for stream in streams]
            running = asyncio.create_task(plain.post(ask.path, json=ask.body, timeout=PATIENCE))
            while (await plain.get("/health")).json()["running"] < 3:
                await asyncio.sleep(0)
            waiting = asyncio.create_task(plain.post(ask.path, json=ask.body, timeout=PATIENCE))
            while (await plain.get("/health")).json()["waiting"] < 1:
                await asyncio.sleep(0)
            server.signal(signal.SIGTERM)
            refused = await waiting
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert (await plain.get("/health/ready")).status_code == 503
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model=MODEL, prompt="Too late")
            texts = [
                first + "".join([chunk.choices[0].text async for chunk in stream])
                for first, stream in zip(begun, streams, strict=True)
            ]
            whole = (await running).json()
        assert whole["usage"]["completion_tokens"] == 24
        assert texts == [whole["choices"][0]["text"]] * 2
        assert server.exit_code() == 0
        assert server.complaints == ""


async def test_after_the_drain_time_they_end_with_an_error() -> None:
    with serving("--drain-timeout", "0.01") as server:
        async with sdk(server.url) as client:
            create = client.chat.completions.create
            body = {"ignore_eos": True}
            stream = await create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body=body
            )
            await anext(stream)
            await anext(stream)
            whole = asyncio.create_task(
                create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body=body)
            )
            async with httpx.AsyncClient(base_url=server.url) as plain:
                while (await plain.get("/health")).json()["running"] < 2:
                    await asyncio.sleep(0)
            server.signal(signal.SIGINT)
            with pytest.raises(openai.APIError) as broken:
                async for _ in stream:
                    pass
            assert broken.value.code == "unavailable"
            with pytest.raises(openai.InternalServerError) as refused:
                await whole
            assert refused.value.status_code == 503
        assert server.exit_code() == 0
        assert server.complaints == ""


async def test_a_second_signal_ends_it_at_once() -> None:
    with serving("--drain-timeout", "3600") as server:
        async with sdk(server.url) as client:
            stream = await client.completions.create(
                model=MODEL, prompt="Hi", stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
            )
            await anext(stream)
            server.signal(signal.SIGTERM)
            async with httpx.AsyncClient(base_url=server.url) as plain:
                while (await plain.get("/health")).json()["status"] != "draining":
                    await asyncio.sleep(0)
            await anext(stream)
            server.signal(signal.SIGTERM)
            assert server.exit_code() == 0
            with pytest.raises(openai.APIConnectionError):
                async for _ in stream:
                    pass


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [COMMAND, "serve", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line and "in use" in line
