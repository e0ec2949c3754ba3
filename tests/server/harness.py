"""A server over the real engine and a fake model, in process or on a socket."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.media import MediaProcessor
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.memory.vocabulary import Device
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.server.app import create_app
from chairlift.server.connection import DEFAULT_LIMITS, Connection
from chairlift.server.metrics import ServerMetrics
from chairlift.server.observe.traces import Tracing
from chairlift.server.security.settings import ConnectionLimits
from chairlift.server.settings import ServerSettings
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, fake_model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "org/fake"

JSON = dict[str, object]


def chat_body(**more: object) -> JSON:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **more}


def completion_body(**more: object) -> JSON:
    return {"model": MODEL, "prompt": "Hi", "temperature": 0, **more}


@dataclass(frozen=True)
class Lift:
    """One running server and what it stands on."""

    engine: Engine
    runner: FakeRunner
    tokenizer: FakeTokenizer
    app: FastAPI
    client: httpx.AsyncClient

    async def chat(self, **more: object) -> httpx.Response:
        return await self.client.post(CHAT, json=chat_body(**more))

    async def complete(self, **more: object) -> httpx.Response:
        return await self.client.post(COMPLETIONS, json=completion_body(**more))

    async def metric(self, sample: str) -> float:
        """The value of one line of /metrics, by its name and labels without the prefix and, where it has one,
        model_name."""
        name, _, labels = sample.partition("{")
        labels = labels.rstrip("}")
        parts = [part for part in (*labels.split(","), f'model_name="{MODEL}"') if part]
        inside = ",".join(sorted(parts))
        starts = (f"chairlift_{name}{{{inside}}} ", f"chairlift_{sample} ")
        text = (await self.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(starts)]
        assert len(lines) == 1, (starts, lines)
        return float(lines[0].rpartition(" ")[2])

    async def until_idle(self) -> None:
        """Wait until no row is left, which the engine says by an idle plan."""
        async with asyncio.timeout(10):
            while self.engine.stats().busy:
                await asyncio.sleep(0)


@asynccontextmanager
async def lift(
    runner: FakeRunner | None = None,
    *,
    tokenizer: FakeTokenizer | None = None,
    config: EngineConfig | None = None,
    settings: ServerSettings | None = None,
    context_length: int = 4096,
    processor: MediaProcessor | None = None,
    prefix: PrefixSpec | None = None,
    tracing: Tracing | None = None,
    states: StateSizes | None = None,
    device: Device | None = None,
    start: bool = True,
) -> AsyncIterator[Lift]:
    runner = runner or FakeRunner()
    tokenizer = tokenizer or FakeTokenizer()
    metrics = ServerMetrics()
    engine = Engine(
        fake_model(
            runner,
            tokenizer,
            name=MODEL,
            context_length=context_length,
            processor=processor,
            prefix=prefix,
            states=states,
            device=device,
        ),
        config,
        observer=metrics.model(MODEL),
    )
    metrics.model(MODEL).watch(engine)
    app = create_app(engine, settings or ServerSettings(), metrics, tracing=tracing)
    if start:
        await engine.start()
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Lift(engine, runner, tokenizer, app, client)
    finally:
        runner.open_gate()
        await engine.stop()
        await app.state.context.responses.close()
        assert runner.violations == []


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


@asynccontextmanager
async def on_socket(app: FastAPI, limits: ConnectionLimits = DEFAULT_LIMITS) -> AsyncIterator[str]:
    """Base URL of the app behind uvicorn on a free port of this loop."""
    http: Any = partial(Connection, limits=limits)
    config = uvicorn.Config(
        app, http=http, ws="none", port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = _Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    serving = asyncio.create_task(server.main_loop())
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving
        await server.shutdown()


def sse(text: str) -> list[tuple[str, str]]:
    """(event, data) of a whole stream; comments are left out. Every event must end in an empty line."""
    assert text.endswith("\n\n")
    events: list[tuple[str, str]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        event, data = "message", ""
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "data":
                data += value
            else:
                assert line.startswith(":"), line
        if data:
            events.append((event, data))
    return events


def stream_of(response: httpx.Response) -> list[JSON]:
    """The chunks of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = sse(response.text)
    assert events[-1] == ("message", "[DONE]")
    assert {event for event, _ in events} == {"message"}
    return [json.loads(data) for _, data in events[:-1]]


def error_of(response: httpx.Response, status: int) -> JSON:
    """The error in the envelope, checked for its form and the request's id."""
    assert response.status_code == status, response.text[:300]
    assert re.fullmatch(r"[a-z]+[_-][0-9a-f]{32}", response.headers["x-request-id"])
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    return dict(error)
