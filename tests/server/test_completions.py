"""Text completions: forms of the prompt, several choices, echo."""

from __future__ import annotations

import pytest
from openai.types import Completion

from chairlift.engine.engine import EngineConfig
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRow, FakeRunner, answering
from tests.server.harness import JSON, error_of, lift, stream_of


def shouting(row: FakeRow) -> int:
    """The prompt's first byte, in capitals, for ever: choices can be told apart."""
    return ord(chr(row.tokens[0]).upper())


async def test_a_whole_answer() -> None:
    async with lift(FakeRunner(answering("there"))) as server:
        response = await server.complete()
    answer = Completion.model_validate(response.json(), strict=True)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "there", "stop")
    ]
    usage = answer.usage
    assert usage and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 6, 8)


async def test_sixteen_tokens_by_default_as_openai() -> None:
    async with lift(FakeRunner(shouting)) as server:
        choice = (await server.complete()).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("H" * 16, "length")


@pytest.mark.parametrize(
    ("prompt", "texts", "prompt_tokens"),
    [
        ("ab", ["AA"], 2),
        (["ab", "cde", "f"], ["AA", "CC", "FF"], 6),
        ([97, 98], ["AA"], 2),
        ([[97], [98, 99]], ["AA", "BB"], 3),
        (["ab"], ["AA"], 2),
    ],
)
async def test_every_form_of_prompt(prompt: object, texts: list[str], prompt_tokens: int) -> None:
    async with lift(FakeRunner(shouting)) as server:
        whole = (await server.complete(prompt=prompt, max_tokens=2)).json()
        chunks = stream_of(
            await server.complete(
                prompt=prompt, max_tokens=2, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 2 * len(texts),
        "total_tokens": prompt_tokens + 2 * len(texts),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert whole["usage"] == chunks[-1]["usage"] == usage
    assert [joined(chunks, index) for index in range(len(texts))] == texts
    for index in range(len(texts)):
        assert [choice["finish_reason"] for choice in choices(chunks, index)][-1] == "length"


def choices(chunks: list[JSON], index: int) -> list[JSON]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]  # type: ignore[attr-defined]


def joined(chunks: list[JSON], index: int) -> str:
    return "".join(str(choice["text"]) for choice in choices(chunks, index))


async def test_choices_are_streamed_interleaved() -> None:
    async with lift(FakeRunner(shouting)) as server:
        chunks = stream_of(await server.complete(prompt=["a", "b"], max_tokens=4, stream=True))
    indexes = [chunk["choices"][0]["index"] for chunk in chunks]  # type: ignore[index]
    assert indexes.index(1) < len(indexes) - 1 - indexes[::-1].index(0)
    assert len({str(chunk["id"]) for chunk in chunks}) == 1


async def test_the_answers_are_those_of_separate_requests() -> None:
    prompts = ["one", "another prompt", "x"]
    async with lift() as server:
        together = (await server.complete(prompt=prompts)).json()["choices"]
        alone = [(await server.complete(prompt=prompt)).json()["choices"][0]["text"] for prompt in prompts]
    assert [choice["text"] for choice in together] == alone
    assert len(set(alone)) == 3


async def test_echo() -> None:
    async with lift(FakeRunner(shouting)) as server:
        text = (await server.complete(prompt=["ab", "c"], echo=True, max_tokens=1)).json()["choices"]
        tokens = (await server.complete(prompt=[97, 195, 164], echo=True, max_tokens=1)).json()["choices"]
        chunks = stream_of(await server.complete(prompt=["ab", "c"], echo=True, max_tokens=1, stream=True))
    assert [choice["text"] for choice in text] == ["abA", "cC"]
    assert tokens[0]["text"] == "aäA"
    assert [joined(chunks, 0), joined(chunks, 1)] == ["abA", "cC"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[97], []], "prompt[1]"),
        ([97, "a"], "prompt[1]"),
        (["a", 97], "prompt[1]"),
        ([[97], 97], "prompt[1]"),
        ([[97], ["a"]], "prompt[1][0]"),
        ([97, True], "prompt[1]"),
        ([97, 1.5], "prompt[1]"),
        ([97, None], "prompt[1]"),
        ([97, -1], "prompt[1]"),
        ([97, 260], "prompt[1]"),
        ([[97], [98, 260]], "prompt[1][1]"),
        ([10**30], "prompt[0]"),
        ([-(10**30)], "prompt[0]"),
        (5, "prompt"),
        ({"text": "a"}, "prompt"),
        (None, "prompt"),
        (True, "prompt"),
    ],
)
async def test_prompts_that_are_refused(prompt: object, param: str) -> None:
    async with lift() as server:
        assert error_of(await server.complete(prompt=prompt), 400)["param"] == param
        assert server.engine.stats().prompt_tokens == 0


async def test_too_many_prompts() -> None:
    async with lift(settings=ServerSettings(max_prompts=3)) as server:
        assert error_of(await server.complete(prompt=["a"] * 4), 400)["param"] == "prompt"
        assert error_of(await server.complete(prompt=[[97]] * 4), 400)["param"] == "prompt"
        assert (await server.complete(prompt=["a"] * 3, max_tokens=1)).status_code == 200
        assert (await server.complete(prompt=[97] * 4, max_tokens=1)).status_code == 200


async def test_one_prompt_too_long_is_named_and_nothing_runs() -> None:
    async with lift(context_length=8) as server:
        before = server.engine.stats().steps
        error = error_of(await server.complete(prompt=["a", "b" * 8]), 400)
        await server.until_idle()
        assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
        assert all(not plan.prefill for plan in server.runner.plans[before:])
        assert error_of(await server.complete(prompt="b" * 8), 400)["param"] == "prompt"


async def test_prompts_that_do_not_all_fit_the_queue_are_refused_together() -> None:
    config = EngineConfig(max_num_seqs=1, max_waiting=1)
    async with lift(FakeRunner(answering("a")), config=config) as server:
        response = await server.complete(prompt=["a", "b", "c", "d"])
        error = error_of(response, 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        await server.until_idle()
        assert server.engine.stats().waiting == 0
        assert (await server.complete(prompt=["a", "b"])).status_code == 200
