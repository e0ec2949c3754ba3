"""The first law on real weights and over HTTP: company changes nobody's answer."""

from __future__ import annotations

import asyncio
import random

import httpx
import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.models.tokenizer import load_tokenizer
from tests.served.conftest import SEATS
from tests.served.process import PATIENCE, Served
from tests.served.talk import (
    TEXT,
    Answer,
    Ask,
    ask_and_leave,
    chat,
    complete,
    connection,
    idle,
    metrics,
    streamed,
    whole,
)

pytestmark = pytest.mark.slow

GREEDY = (
    complete("The sea at night is", max_tokens=16),
    complete(TEXT, max_tokens=6),
    complete((TEXT * 3)[:1300], max_tokens=8, ignore_eos=True),
    complete([1, 504, 3575, 282], max_tokens=16),
    chat("What is the capital of France?", max_tokens=24),
    chat("Name a colour.", "Red.", "And another one?", max_tokens=16),
    chat(TEXT[:420] + "Summarize this in one sentence.", max_tokens=8, logprobs=True),
    chat("Write the numbers from 1 to 9, separated by commas.", max_tokens=32, stop="4"),
)
"""Prompts of 4 to 300 tokens."""

SAMPLED = tuple(
    Ask(ask.path, {**ask.body, "temperature": 0.8, "max_tokens": 6, "seed": seed, **filters})
    for ask, seed, filters in (
        (GREEDY[0], 7, {"top_p": 0.9}),
        (GREEDY[0], 7, {"top_p": 0.9}),  # the same once more
        (GREEDY[0], 8, {"top_p": 0.9}),
        (GREEDY[3], 2**63, {"top_k": 40}),
        (GREEDY[4], -1, {"top_p": 0.95, "top_k": 20}),
        (GREEDY[5], 0, {"min_p": 0.05}),
    )
)


async def alone(client: httpx.AsyncClient, asks: tuple[Ask, ...]) -> list[Answer]:
    """Their answers one after the other on an idle server."""
    await idle(client)
    return [await whole(client, ask) for ask in asks]


@pytest.fixture(scope="module")
def solo(served: Served) -> list[Answer]:
    """What each of `GREEDY` is answered alone."""

    async def ask() -> list[Answer]:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE) as client:
            return await alone(client, GREEDY)

    return asyncio.run(ask())


def assert_equal(answers: list[Answer], solo: list[Answer]) -> None:
    """Text, end and both counts of tokens."""
    for answer, expected in zip(answers, solo, strict=True):
        assert answer == expected


def test_solo_answers_are_those_of_mlx_lm(solo: list[Answer]) -> None:
    folder = resolve_model(None).folder
    model, _ = mlx_lm.load(str(folder))
    tokenizer = load_tokenizer(folder)
    question: list[dict[str, object]] = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = {0: tokenizer.encode("The sea at night is"), 4: tokenizer.apply_chat_template(question)}
    for at, prompt in prompts.items():
        most = GREEDY[at].body["max_tokens"]
        tokens: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=most):
            tokens.append(int(token))
            if tokens[-1] in tokenizer.eos_token_ids:
                break
        assert solo[at].text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert (solo[at].prompt_tokens, solo[at].completion_tokens) == (len(prompt), len(tokens))


def test_the_prompts_test_something(solo: list[Answer]) -> None:
    """Answers differ, some end by themselves, some at a stop string and some at their limit."""
    assert len({answer.text for answer in solo}) == len(GREEDY)
    assert {answer.prompt_tokens < 6 for answer in solo} == {True, False}
    assert max(answer.prompt_tokens for answer in solo) > 200
    assert {answer.finish_reason for answer in solo} == {"stop", "length"}
    assert solo[4].text == "The capital of France is Paris."
    assert solo[7].text == "1, 2, 3, "


async def test_together_as_alone(client: httpx.AsyncClient, solo: list[Answer]) -> None:
    asks = (streamed if at % 2 else whole for at in range(len(GREEDY)))
    answers = await asyncio.gather(*(how(client, ask) for how, ask in zip(asks, GREEDY, strict=True)))
    assert_equal(answers, solo)


async def test_together_while_others_come_and_leave(
    served: Served, client: httpx.AsyncClient, solo: list[Answer]
) -> None:
    """More requests than seats, so that rows also join when leavers free them."""
    await idle(client)
    before = await metrics(client)
    endless = complete(TEXT[:200], max_tokens=4000, ignore_eos=True)
    long = complete(TEXT * 2, max_tokens=4000, ignore_eos=True)

    async def leaver(number: int) -> None:
        match number % 4:
            case 0:
                await ask_and_leave(served, endless, 3)
            case 1:
                await ask_and_leave(served, long, 0)
            case 2:  # not streamed, in mid-prefill or mid-decode
                async with connection(served) as (_, writer):
                    writer.write(endless.sent)
                    await writer.drain()
                    await ask_and_leave(served, complete("Two", max_tokens=4000, ignore_eos=True), 4)
            case _:  # two choices of one request
                await ask_and_leave(served, complete(["One", TEXT[:99]], max_tokens=4000), 5)

    async def with_leavers(number: int, ask: Ask) -> Answer:
        going = asyncio.create_task(leaver(number))
        answer = await (whole if number % 2 else streamed)(client, ask)
        await going
        return answer

    answers = await asyncio.gather(*(with_leavers(at, ask) for at, ask in enumerate(GREEDY)))
    assert_equal(answers, solo)
    await idle(client)
    after = await metrics(client)
    assert after["ended_abort"] - before["ended_abort"] >= SEATS
    assert after["ended_error"] == before["ended_error"]


async def test_seeded_draws_are_the_same_in_any_company(
    client: httpx.AsyncClient, solo: list[Answer]
) -> None:
    drawn = await alone(client, SAMPLED)
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert all(answer.text != solo[0].text[: len(answer.text)] for answer in drawn[:3])
    asks = [*SAMPLED, *GREEDY, complete("No seed", temperature=1.5, max_tokens=20)]
    random.Random(1).shuffle(asks)
    answers = dict(
        zip(map(id, asks), await asyncio.gather(*(whole(client, ask) for ask in asks)), strict=True)
    )
    assert_equal([answers[id(ask)] for ask in SAMPLED], drawn)
    assert_equal([answers[id(ask)] for ask in GREEDY], solo)


async def test_the_same_seed_many_times_at_once(client: httpx.AsyncClient) -> None:
    ask = complete("Once upon a time", temperature=1, seed=99, max_tokens=8)
    answers = await asyncio.gather(*(whole(client, ask) for _ in range(SEATS)))
    assert {answer.text for answer in answers} == {answers[0].text}
    unseeded = Ask(ask.path, {**ask.body, "seed": None})
    others = await asyncio.gather(*(whole(client, unseeded) for _ in range(SEATS)))
    assert len({answer.text for answer in others}) > 1
