"""300 requests, many of which leave at random: nothing is left of them, and everything is counted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from tests.served.conftest import QUEUE, SEATS
from tests.served.process import PATIENCE, Served
from tests.served.talk import (
    Answer,
    Ask,
    Metrics,
    ask_and_leave,
    chunks,
    complete,
    connection,
    metrics,
    streamed,
    whole,
)

pytestmark = pytest.mark.slow

REQUESTS = 300
WARM_UP = 100
"""After so many, memory is measured for the first time."""
GROWTH = 24 * 2**20
"""Bytes of resident memory that 200 more requests may add: allocators' slack, not 200 of anything."""
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_bytes", "kv_cache_used_bytes")
REASONS = ("stop", "length", "abort", "error")


@dataclass
class Ledger:
    """What the clients know."""

    whole: list[Answer] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    """Leavers: those that saw a token, and those that may have come too early to be let in."""


async def visit(served: Served, client: httpx.AsyncClient, chance: random.Random, ledger: Ledger) -> None:
    words = ["One", "two", "three", "snow", "lift", "a"]
    prompt = " ".join(chance.choices(words, k=chance.randint(1, 8)))
    ask = complete(prompt, max_tokens=chance.randint(1, 7), temperature=chance.choice([0, 1.0]))
    endless = Ask(ask.path, {**ask.body, "max_tokens": 4000, "ignore_eos": True})
    match chance.randrange(6):
        case 0 | 1:
            ledger.whole.append(await whole(client, ask))
        case 2:
            ledger.whole.append(await streamed(client, ask))
        case 3:  # leaves in mid-stream, the way a client library does
            async with client.stream("POST", ask.path, json=endless.streamed().body) as response:
                stream = chunks(response)
                for _ in range(chance.randint(1, 4)):
                    await anext(stream)
                await stream.aclose()
            ledger.left["with a token"] += 1
        case 4:  # the bare socket goes
            await ask_and_leave(served, endless, at := chance.randint(0, 3))
            ledger.left["with a token" if at else "early"] += 1
        case _:  # not streamed, at some time
            async with connection(served) as (_, writer):
                writer.write(endless.sent)
                await writer.drain()
                await asyncio.sleep(chance.random())
            ledger.left["early"] += 1


async def at_rest(client: httpx.AsyncClient) -> Metrics:
    """Metrics of one moment at which nothing is left of any request; it must come.

    A leaver may be gone before the server has read what it asked for, so that its row comes and goes later.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            now = await metrics(client)
            if not any(now[gauge] for gauge in GAUGES):
                return now
            await asyncio.sleep(0.05)


async def emptied(client: httpx.AsyncClient) -> Metrics:
    """The same without what is kept of prompts for later ones, which is no leak. A late leaver leaves
    some."""
    async with asyncio.timeout(PATIENCE):
        while (now := await at_rest(client))["prefix_cache_bytes"]:
            (await client.delete("/v1/cache")).raise_for_status()
    return now


async def test_soak(served: Served, client: httpx.AsyncClient) -> None:
    chance = random.Random(300)
    ledger, room = Ledger(), asyncio.Semaphore(SEATS + QUEUE // 2)

    async def go() -> None:
        async with room:
            await visit(served, client, chance, ledger)

    before = await at_rest(client)
    await asyncio.gather(*(go() for _ in range(WARM_UP)))
    first, resident = await emptied(client), served.resident_bytes()
    await asyncio.gather(*(go() for _ in range(REQUESTS - WARM_UP)))
    last = await emptied(client)
    assert served.resident_bytes() - resident < GROWTH
    assert last["memory_active_bytes"] == first["memory_active_bytes"]
    assert len(ledger.whole) + ledger.left.total() == REQUESTS
    check_counts(ledger, before, last)
    health = (await client.get("/health")).json()
    assert (health["running"], health["waiting"], health["busy"]) == (0, 0, False)


def check_counts(ledger: Ledger, before: Metrics, after: Metrics) -> None:
    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    ended = {reason: grown(f"ended_{reason}") for reason in REASONS}
    reasons = Counter(answer.finish_reason for answer in ledger.whole)
    assert ended["error"] == 0
    assert (ended["stop"], ended["length"]) == (reasons["stop"], reasons["length"])
    assert ledger.left["with a token"] <= ended["abort"] <= ledger.left.total()
    for name in ("request_prompt_tokens_count", "e2e_request_latency_seconds_count"):
        assert grown(name) == sum(ended.values()), name
    generated = sum(answer.completion_tokens for answer in ledger.whole)
    assert grown("generation_tokens_total") == grown("request_generation_tokens_sum")
    assert grown("generation_tokens_total") >= generated + ledger.left["with a token"]
    assert grown("time_to_first_token_seconds_count") >= len(ledger.whole) + ledger.left["with a token"]
    prompts = sum(answer.prompt_tokens for answer in ledger.whole)
    assert prompts < grown("prompt_tokens_total") <= grown("request_prompt_tokens_sum")
    intervals = grown("inter_token_latency_seconds_count")
    assert intervals + grown("time_to_first_token_seconds_count") == grown("generation_tokens_total")
