"""Far more at once than fits: nothing is lost, every answer is right, and memory stays within the limit.

    python -m tests.faults.memory_limit --clients 48 --limit 2GiB

Each client sends a long prompt of its own to a real server of the embedded model and streams a long answer.
Some are asked again alone when all are done, and must say the same (float32, greedy or seeded). All the while
the process's memory is read and readiness asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

from chairlift.server.configuration.types import parse_size
from tests.served.process import PATIENCE, Served, serving
from tests.served.talk import metrics

WORDS = ("snow", "lift", "rope", "chair", "wind", "pine", "ridge", "bell", "tower", "cable", "fog", "slope")
ALONE = 4
"""Requests that are asked again alone."""


@dataclass(frozen=True)
class Asked:
    """One client's request."""

    number: int
    prompt: str
    tokens: int

    @property
    def body(self) -> dict[str, object]:
        sampled = self.number % 3 == 1
        return {
            "model": "SmolLM2-135M-Instruct",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "temperature": 0.8 if sampled else 0,
            "seed": self.number,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"logprobs": 2} if self.number % 4 == 2 else {}),
        }


@dataclass
class Watched:
    """What was seen of the process."""

    resident: list[int] = field(default_factory=list)
    unready: int = 0


@dataclass(frozen=True)
class Answered:
    text: str
    tokens: int
    logprobs: tuple[float, ...]
    seconds: float


def requests(clients: int, words: tuple[int, int], tokens: tuple[int, int]) -> list[Asked]:
    chance = random.Random(7)
    asked = []
    for number in range(clients):
        text = " ".join(chance.choices(WORDS, k=chance.randint(*words)))
        asked.append(Asked(number, f"Letter {number} of {chance.random()}: {text}", chance.randint(*tokens)))
    return asked


async def ask(client: httpx.AsyncClient, asked: Asked) -> Answered:
    """Raises: AssertionError: anything but a whole answer."""
    begun, text, logprobs, usage, reason = time.monotonic(), "", [], None, None
    async with client.stream("POST", "/v1/completions", json=asked.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
    assert reason == "length" and usage is not None and usage["completion_tokens"] == asked.tokens
    return Answered(text, asked.tokens, tuple(logprobs), time.monotonic() - begun)


async def watch(served: Served, client: httpx.AsyncClient, seen: Watched) -> None:
    while True:
        seen.resident.append(served.resident_bytes())
        seen.unready += (await client.get("/health/ready")).status_code != 200
        await asyncio.sleep(0.5)


async def run(served: Served, asked: list[Asked]) -> dict[str, object]:
    """Figures; raises AssertionError where something was not right."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE * 10, limits=limits) as client:
        seen, idle = Watched(), served.resident_bytes()
        watching = asyncio.create_task(watch(served, client, seen))
        begun = time.monotonic()
        answers = await asyncio.gather(*(ask(client, one) for one in asked))
        seconds = time.monotonic() - begun
        watching.cancel()
        after = await metrics(client)
        step = max(1, len(asked) // ALONE)
        for one, answer in list(zip(asked, answers, strict=True))[::step]:
            alone = await ask(client, one)
            assert alone.text == answer.text, (one.number, alone.text, answer.text)
            assert len(alone.logprobs) == len(answer.logprobs)
            off = [abs(a - b) for a, b in zip(alone.logprobs, answer.logprobs, strict=True)]
            assert max(off, default=0) < 1e-3, (one.number, max(off))
        return {
            "requests": len(asked),
            "answered": len(answers),
            "answer tokens": sum(answer.tokens for answer in answers),
            "seconds": round(seconds),
            "slowest": round(max(answer.seconds for answer in answers)),
            "preemptions": after["num_preemptions_total"],
            "resident idle MB": round(idle / 1e6),
            "resident most MB": round(max(seen.resident) / 1e6),
            "active peak MB": round(after["memory_peak_bytes"] / 1e6),
            "not ready": seen.unready,
            "same alone": len(asked[::step]),
            **{name: value for name, value in after.items() if name.startswith("memory_")},
        }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--clients", type=int, default=48)
    options.add_argument("--limit", default="2GiB")
    options.add_argument("--words", type=int, nargs=2, default=(300, 900))
    options.add_argument("--tokens", type=int, nargs=2, default=(120, 220))
    given = options.parse_args()
    asked = requests(given.clients, tuple(given.words), tuple(given.tokens))
    with serving("--memory-limit", given.limit, "--max-num-seqs", "64") as served:
        try:
            figures = asyncio.run(run(served, asked))
        finally:
            print(served.complaints[-3000:])
        for name, value in figures.items():
            print(f"{name:20} {value}")
        limit = parse_size(given.limit)
        assert limit is not None
        most = figures["resident most MB"]
        assert isinstance(most, int) and most * 1e6 <= limit, "more than the limit was resident"
        assert figures["memory_waits_total"] or figures["preemptions"], "everything fitted: it was no test"


if __name__ == "__main__":
    main()
