"""Mixed traffic for as long as one likes: is what a server holds as flat at the end as it was before?

    python -m tests.faults.soak --minutes 30

The server of a small random hybrid model that sees (a Qwen3.5) is asked for chats, streams, conversations
with shared beginnings, answers under a schema and answers about images, and clients leave in the middle.
Every few seconds it is written down what the process and MLX hold. Kept prefixes fill their memory in the
first minutes, which do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.mlx.test_vision_http import picture, write_model
from tests.served.process import PATIENCE, Served, serving

CHAT = "/v1/chat/completions"
WARM_UP = 0.1
"""Of the time, in which kept prefixes fill their memory."""
SLACK = {"resident": 24 * 2**20, "active": 2 * 2**20, "cached": 64 * 2**20, "buffers": 64, "kept": 64}
SHARE = 0.03
"""A series is flat if its last third is above its first by no more than this share and the slack above:
requests in the moment of reading, and the allocators' holes."""
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
LETTERS = list(range(33, 90))
"""Tokens whose text is read back as the same tokens."""
WORDS = ("one", "chair", "after", "the", "other", "snow", "lift", "hill", "never", "stops")
SYSTEMS = tuple(f"System {number}. " + " ".join(WORDS) * 6 for number in range(4))


@dataclass(frozen=True, slots=True)
class Reading:
    """What the server held at a moment.

    Attributes:
        seconds: since the beginning.
        resident: bytes of the process in memory.
        active, cached: bytes of MLX's live arrays, and of freed buffers that it keeps.
        buffers: arrays of weights, rows and pages.
        kept: pages and checkpoints.
        disk: bytes of files.
    """

    seconds: int
    resident: int
    active: int
    cached: int
    buffers: int
    kept: int
    disk: int


@dataclass(slots=True)
class Soak:
    """
    Args:
        server: to be asked.
        pause: seconds between two requests of a client.
        every: seconds between two readings.
    """

    server: Served
    client: httpx.AsyncClient
    pause: float
    every: float
    readings: list[Reading] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float, clients: int) -> None:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._visit(random.Random(seed))) for seed in range(clients)]
            while time.monotonic() - begun < seconds:
                await asyncio.sleep(self.every)
                self.readings.append(await self._read(int(time.monotonic() - begun)))
                print(*astuple(self.readings[-1]), sep=",", flush=True)
            for task in tasks:
                task.cancel()

    async def _visit(self, draw: random.Random) -> None:
        kinds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "chat": self._chat,
            "stream": self._stream,
            "left": self._leave,
            "turns": self._turns,
            "schema": self._schema,
            "image": self._image,
        }
        while True:
            kind = draw.choice(list(kinds))
            try:
                await kinds[kind](draw)
            except (httpx.HTTPError, AssertionError) as error:
                self.failed[f"{kind}: {error!r}"[:200]] += 1
            self.asked[kind] += 1
            await asyncio.sleep(self.pause * draw.random() * 2)

    async def _chat(self, draw: random.Random) -> None:
        await self._whole([said("user", words(draw, 1, 40))], temperature=draw.choice([0, 1]))

    async def _stream(self, draw: random.Random) -> None:
        await self._streamed([said("user", words(draw, 1, 40))], sys.maxsize)

    async def _leave(self, draw: random.Random) -> None:
        await self._streamed([said("user", words(draw, 1, 40))], draw.randint(0, 5), max_tokens=2000)

    async def _turns(self, draw: random.Random) -> None:
        messages = [said("system", draw.choice(SYSTEMS))]
        for _ in range(3):
            messages.append(said("user", words(draw, 5, 20)))
            messages.append(said("assistant", await self._whole(messages, allowed_token_ids=LETTERS)))

    async def _schema(self, draw: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        more = {"response_format": form, "max_tokens": 60, "ignore_eos": False}
        text = "".join((await self._whole([said("user", words(draw, 1, 9))], **more)).split())
        # A random model may fill its tokens with the white space that JSON may have anywhere.
        assert any(right.startswith(text) for right in ('{"n":1}', '{"n":2}')), text

    async def _image(self, draw: random.Random) -> None:
        seed, text = draw.randrange(200), {"type": "text", "text": words(draw, 3, 20)}
        await self._whole([said("user", [picture(64, 96, seed), text])])

    async def _whole(self, messages: Sequence[dict[str, Any]], **more: Any) -> str:
        response = await self.client.post(CHAT, json=self._body(messages, more))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    async def _streamed(self, messages: Sequence[dict[str, Any]], chunks: int, **more: Any) -> None:
        body = self._body(messages, {**more, "stream": True})
        async with self.client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            async for line in lines:
                chunks -= line.startswith("data: ")
                if chunks <= 0 or line == "data: [DONE]":
                    break

    def _body(self, messages: Sequence[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "model", "messages": list(messages), "max_tokens": 24, "ignore_eos": True}
        return {**body, **more}

    async def _read(self, seconds: int) -> Reading:
        found: Counter[str] = Counter()
        text = (await self.client.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name.removeprefix("chairlift_")] += sample.value  # type: ignore[assignment]
        return Reading(
            seconds,
            self.server.resident_bytes(),
            int(found["memory_active_bytes"]),
            int(found["memory_cache_bytes"]),
            int(found["memory_buffers"]),
            int(found["prefix_cache_pages"] + found["prefix_cache_checkpoints"]),
            int(found["prefix_cache_disk_bytes"]),
        )


def words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def said(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


@dataclass(frozen=True, slots=True)
class Series:
    """One thing that was read: medians of the first and of the last third of the time."""

    name: str
    first: float
    last: float
    largest: float

    @property
    def flat(self) -> bool:
        return self.last - self.first <= SHARE * self.first + SLACK[self.name]


def series_of(readings: Sequence[Reading]) -> list[Series]:
    """Of all that is to be flat, without the warm-up."""
    counted = readings[int(WARM_UP * len(readings)) :]
    third = max(1, len(counted) // 3)
    found = []
    for name in SLACK:
        values = [getattr(reading, name) for reading in counted]
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        found.append(Series(name, first, last, max(values)))
    return found


async def soak(model: Path, folder: Path, minutes: float, clients: int, pause: float, every: float) -> Soak:
    """Serve and ask for so many minutes."""
    options = (
        *("--no-access-log", "--prefix-cache-ram", "4MB"),
        *("--prefix-cache-disk", "64MB", "--prefix-cache-dir", str(folder)),
    )
    with serving("--model", str(model), "--served-model-name", "model", *options) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            work = Soak(server, client, pause, every)
            await work.run(60 * minutes, clients)
        work.server.process.terminate()
        assert server.exit_code() == 0, server.complaints
        if server.complaints:
            work.failed[f"said: {server.complaints[:500]}"] += 1
        return work


def main() -> int:
    options = argparse.ArgumentParser(description="Mixed traffic; is what the server holds flat?")
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--clients", type=int, default=3)
    options.add_argument("--pause", type=float, default=1.0, help="seconds between a client's requests")
    options.add_argument("--every", type=float, default=10.0, help="seconds between readings")
    options.add_argument("--nice", type=int, default=10)
    given = options.parse_args()
    os.nice(given.nice)
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model", "qwen3_5")
        done = asyncio.run(
            soak(model, Path(place) / "prefixes", given.minutes, given.clients, given.pause, given.every)
        )
    print("asked:", dict(done.asked), "failed:", dict(done.failed))
    found = series_of(done.readings)
    for one in found:
        told = f"{one.first:.0f} in the first third, {one.last:.0f} in the last, {one.largest:.0f} at most"
        print(f"{one.name}: {told}: {'flat' if one.flat else 'GROWS'}")
    return bool(done.failed) or not all(one.flat for one in found)


if __name__ == "__main__":
    raise SystemExit(main())
