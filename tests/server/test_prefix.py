"""Kept prefixes and priorities, as a client sees them."""

from __future__ import annotations

import asyncio
import json

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.prefix.vocabulary import PrefixSpec
from tests.engine.driving import settled
from tests.fakes import FakeRunner, answering
from tests.server.harness import MODEL, error_of, lift, sse

SPEC = PrefixSpec(block_tokens=8, bytes_per_token=4)
CONFIG = EngineConfig(prefix_cache_bytes=10**6)


def cached(answer: object) -> int:
    assert isinstance(answer, dict)
    count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


async def test_the_next_turn_begins_behind_the_last() -> None:
    async with lift(FakeRunner(answering("Yes.")), config=CONFIG, prefix=SPEC) as server:
        messages = [{"role": "user", "content": "Are you there, after all this time?"}]
        first = (await server.chat(messages=messages)).json()
        again = (await server.chat(messages=messages)).json()
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Good."}]
        turn = (await server.chat(messages=messages)).json()
        streamed = await server.chat(messages=messages, stream=True, stream_options={"include_usage": True})
        metrics = [await server.metric(f"prefix_cache_{name}_total") for name in ("queries", "hits")]
    prompt = first["usage"]["prompt_tokens"]
    assert cached(first) == 0 and cached(again) == prompt - 1
    # The answer ended with the model's own token, where the template writes another.
    assert cached(turn) == prompt + len("Yes.")
    last = json.loads(sse(streamed.text)[-2][1])
    assert cached(last) == turn["usage"]["prompt_tokens"] - 1
    assert [first["choices"][0]["message"]["content"]] * 2 == [
        "Yes.",
        turn["choices"][0]["message"]["content"],
    ]
    assert metrics[1] == cached(again) + cached(turn) + cached(last) < metrics[0]


async def test_completions_say_what_was_cached_and_salts_divide() -> None:
    async with lift(FakeRunner(answering("b")), config=CONFIG, prefix=SPEC) as server:
        counts = []
        for salt in (None, "one", None, "one", "two"):
            answer = await server.complete(prompt="a" * 30, cache_salt=salt)
            counts.append(cached(answer.json()))
    assert counts == [0, 0, 29, 29, 0]


async def test_responses_divide_by_salts_too() -> None:
    async with lift(FakeRunner(answering("b")), config=CONFIG, prefix=SPEC) as server:
        counts = []
        for salt in (None, "one", None, "one"):
            body = {"model": MODEL, "input": "a" * 30, "cache_salt": salt}
            usage = (await server.client.post("/v1/responses", json=body)).json()["usage"]
            counts.append(usage["input_tokens_details"]["cached_tokens"])
    assert counts == [0, 0, usage["input_tokens"] - 1, usage["input_tokens"] - 1]


async def test_many_choices_of_a_prompt_compute_it_once() -> None:
    runner = FakeRunner(answering("b"))
    async with lift(runner, config=CONFIG, prefix=SPEC) as server:
        answer = (await server.complete(prompt="a" * 30, n=4)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["b"] * 4
    prefilled = sum(len(span.tokens) for plan in runner.plans for span in plan.prefill)
    assert prefilled == 5 + 30 + 3 * 6, "the self-test, the prompt, and what lies behind its last whole block"


async def test_without_a_store_nothing_is_cached() -> None:
    async with lift(
        FakeRunner(answering("b")), config=EngineConfig(prefix_cache_bytes=0), prefix=SPEC
    ) as server:
        answers = [(await server.complete(prompt="a" * 30)).json() for _ in range(2)]
    assert [cached(answer) for answer in answers] == [0, 0]


@pytest.mark.parametrize(
    "body", [{"cache_salt": ""}, {"cache_salt": 5}, {"priority": 1.5}, {"priority": 2**40}]
)
async def test_bad_values_are_refused_by_name(body: dict[str, object]) -> None:
    async with lift() as server:
        (name,) = body
        assert error_of(await server.chat(**body), 400)["param"] == name
        response = await server.client.post("/v1/responses", json={"model": MODEL, "input": "a", **body})
        assert error_of(response, 400)["param"] == name


async def test_smaller_priorities_go_first() -> None:
    runner = FakeRunner(answering("b"))
    async with lift(runner, config=EngineConfig(max_num_seqs=1)) as server:
        await settled(server.engine)  # what the self-test leaves to release may stand at the gate, too
        runner.close_gate()
        asked = [asyncio.create_task(server.complete(prompt="first", max_tokens=2))]
        await runner.at_gate()
        for prompt, priority in (("late", 5), ("soon", -5), ("normal", None)):
            asked.append(asyncio.create_task(server.complete(prompt=prompt, max_tokens=2, priority=priority)))
            while server.engine.stats().waiting < len(asked) - 1:
                await asyncio.sleep(0)
        body = {"model": MODEL, "input": "soonest", "max_output_tokens": 2, "priority": -6}
        asked.append(asyncio.create_task(server.client.post("/v1/responses", json=body)))
        while server.engine.stats().waiting < len(asked) - 1:
            await asyncio.sleep(0)
        runner.open_gate()
        assert [(await answer).status_code for answer in asked] == [200] * 5
        spans = [span.tokens for plan in runner.plans for span in plan.prefill]
        prompts = [bytes(token for token in span if token < 256).decode() for span in spans]
    first, soonest, *rest = prompts[-5:]
    assert first == "first" and "soonest" in soonest and rest == ["soon", "normal", "late"]
