"""A server whose memory is bounded, as a client sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.guard import COPIES, LEAST_CACHE
from chairlift.engine.memory.states import StateSizes
from tests.fakes import FakeRunner, fake_model
from tests.server.harness import CHAT, COMPLETIONS, MODEL, error_of, lift

SIZES = StateSizes(1000)
FIXED = COPIES + LEAST_CACHE
"""What a model without weights sets apart for its steps."""


@dataclass
class FakeDevice:
    """Of a GPU with memory of its own, unless told otherwise."""

    shared: bool = False
    held: int = 0
    """Bytes of the process."""
    bounds: tuple[int, int] | None = None

    def usable(self) -> int:
        return FIXED + SIZES.slots(1, 1024)

    def bound(self, total: int, cache: int) -> None:
        self.bounds = (total, cache)

    def tidy(self) -> None:
        pass

    def footprint(self) -> int:
        return self.held


LONG = "x" * 1500
ASKED: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
    COMPLETIONS: {"prompt": LONG},
    "/v1/responses": {"input": LONG},
}


@pytest.mark.parametrize("path", ASKED)
async def test_what_could_never_be_held_is_refused_with_the_numbers(path: str) -> None:
    async with lift(states=SIZES, device=FakeDevice()) as server:
        refused = await server.client.post(path, json={"model": MODEL, **ASKED[path]})
        ready = await server.client.get("/health/ready")
    assert ready.status_code == 200
    error = error_of(refused, 400)
    assert error["code"] == "context_length_exceeded"
    assert "Up to" in str(error["message"]) and "1.024 MB" in str(error["message"])


async def test_anthropics_surface_refuses_in_its_own_form() -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}
    async with lift(states=SIZES, device=FakeDevice()) as server:
        refused = await server.client.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert "Up to" in refused.json()["error"]["message"]


async def test_too_long_an_answer_is_refused_by_name_and_one_of_no_given_length_is_not() -> None:
    async with lift(states=SIZES, device=FakeDevice()) as server:
        refused = await server.complete(max_tokens=2000)
        answer = await server.complete(max_tokens=500, ignore_eos=True)
        unbounded = await server.chat(ignore_eos=True)
    assert refused.status_code == 400 and error_of(refused, 400)["param"] == "max_tokens"
    assert answer.json()["usage"]["completion_tokens"] == 500
    assert unbounded.json()["choices"][0]["finish_reason"] == "length"
    assert 500 < unbounded.json()["usage"]["completion_tokens"] < 1024


async def test_the_start_and_every_refusal_tell_one_number() -> None:
    async with lift(states=SIZES, device=FakeDevice()) as server:
        longest = server.engine.longest_request
        for body in ({"prompt": LONG}, {"prompt": "Hi", "max_tokens": 3000}, {"prompt": "x" * 900}):
            refused = await server.complete(**{"max_tokens": 500, **body})
            told = str(error_of(refused, 400)["message"])
            assert f"Up to {longest} tokens fit, prompt and answer together." in told
    assert 512 < longest < 1024
    async with lift(states=SIZES, device=FakeDevice(), context_length=100) as server:
        assert server.engine.longest_request == 100


async def test_many_at_once_are_all_answered_as_alone() -> None:
    device = FakeDevice()
    async with lift(states=SIZES, device=device) as server:
        bodies: list[dict[str, object]] = [
            {"prompt": f"{at} " * 60, "max_tokens": 200, "ignore_eos": True} for at in range(12)
        ]
        together = await asyncio.gather(*(server.complete(**body) for body in bodies))
        stats = server.engine.stats()
        alone = [await server.complete(**body) for body in bodies]
    assert device.bounds == (device.usable(), LEAST_CACHE)
    assert stats.memory.limit == device.usable() and stats.memory.waits > 0
    texts = [answer.json()["choices"][0]["text"] for answer in together]
    assert texts == [answer.json()["choices"][0]["text"] for answer in alone]


async def test_a_model_that_leaves_no_room_is_not_served() -> None:
    config = EngineConfig(memory_limit_bytes=FIXED)
    engine = Engine(fake_model(FakeRunner(), states=SIZES, device=FakeDevice()), config)
    with pytest.raises(ModelUnavailable, match="--memory-limit"):
        await engine.start()


async def test_without_a_bound_nothing_is_refused_for_memory() -> None:
    config = EngineConfig(memory_limit_bytes=0)
    async with lift(states=SIZES, device=FakeDevice(), config=config) as server:
        answer = await server.complete(prompt=LONG, max_tokens=1000, ignore_eos=True)
        assert server.engine.stats().memory.limit == 0
    assert answer.json()["usage"]["completion_tokens"] == 1000
