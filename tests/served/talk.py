"""Asking the served model, patiently and not, and reading what it tells Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.exchange import exchange, request_bytes
from tests.served.process import MODEL, PATIENCE, Served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = (
    "The old lift climbs slowly from the village to the ridge. In winter it carries skiers, one chair after "
    "the other, and it never stops for those who get on or off. In summer it carries hikers, their bags, and "
    "sometimes a dog that would rather walk. The man who runs it has worked here for thirty years. He knows "
    "every pylon by its sound, and he says that the wind tells him the evening before whether he may sleep "
    "late. Below the second station there is a meadow with a brook. Children build dams in it out of stones "
    "and moss; by morning the water has always found another way. "
)


@dataclass(frozen=True)
class Ask:
    """A request as a client sends it."""

    path: str
    body: dict[str, Any]

    @property
    def sent(self) -> bytes:
        return request_bytes(self.path, self.body)

    def streamed(self) -> Ask:
        return Ask(self.path, {**self.body, "stream": True, "stream_options": {"include_usage": True}})


def chat(*said: str, **more: object) -> Ask:
    """A conversation in which user and assistant take turns, answered with the most probable tokens."""
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(said)]
    return Ask(CHAT, {"model": MODEL, "messages": messages, "temperature": 0, **more})


def complete(prompt: object, **more: object) -> Ask:
    return Ask(COMPLETIONS, {"model": MODEL, "prompt": prompt, "temperature": 0, **more})


@dataclass
class Answer:
    """What came of one choice."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: list[str] = field(default_factory=list)
    """Text of each token, where completions were asked for `logprobs`."""

    def take(self, payload: dict[str, Any]) -> None:
        """A chunk of a stream, or the whole answer."""
        for choice in payload["choices"]:
            said = choice.get("delta", choice.get("message", choice))
            self.text += said.get("content", said.get("text")) or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if "text" in choice and choice["logprobs"]:
                self.tokens += choice["logprobs"]["tokens"]
        if usage := payload.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]


async def whole(client: httpx.AsyncClient, ask: Ask) -> Answer:
    response = await client.post(ask.path, json=ask.body)
    assert response.status_code == 200, response.text
    answer = Answer()
    answer.take(response.json())
    return answer


async def chunks(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    """The payloads of a stream, which must end well."""
    assert response.status_code == 200, (await response.aread()).decode()
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line and not line.startswith(":"):  # a comment, which keeps a silent stream open
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream broke off")


async def streamed(client: httpx.AsyncClient, ask: Ask) -> Answer:
    answer = Answer()
    async with client.stream("POST", ask.path, json=ask.streamed().body) as response:
        async for chunk in chunks(response):
            answer.take(chunk)
    return answer


@asynccontextmanager
async def connection(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare socket, closed without a word at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def ask_and_leave(served: Served, ask: Ask, chunks: int) -> None:
    """Ask for a stream and close the socket after so many of its chunks: at 0, before it can begin."""
    reply = await exchange(served.port, ask.streamed().sent, events=chunks)
    assert reply.body.count(b"data: ") >= chunks, reply


Metrics = dict[str, float]


async def metrics(client: httpx.AsyncClient) -> Metrics:
    """Samples by name, without prefix; those of request_success as `ended_<reason>`."""
    response = await client.get("/metrics")
    found: Metrics = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if reason := sample.labels.get("finished_reason"):
                if sample.name.endswith("_total"):
                    found[f"ended_{reason}"] = sample.value
            elif "le" not in sample.labels:
                found[sample.name.removeprefix("chairlift_")] = sample.value
    return found


async def idle(client: httpx.AsyncClient) -> None:
    """Wait until the server holds no request and has nothing left to do."""
    async with asyncio.timeout(PATIENCE):
        while (await client.get("/health")).json()["busy"]:
            await asyncio.sleep(0.05)
