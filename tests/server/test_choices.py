"""`n` and `best_of`: several answers to one prompt."""

from __future__ import annotations

import gc

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from chairlift.engine.engine import EngineConfig
from chairlift.engine.plan import Sample, StepPlan, StepResult
from chairlift.server.choices import sibling_seed
from tests.fake_tokenizer import EOS
from tests.fakes import FakeRow, FakeRunner, Fault, all_rows, answering
from tests.server.harness import JSON, Lift, error_of, lift, stream_of

WARM: JSON = {"temperature": 1, "seed": 5, "max_tokens": 6}


def seeds(server: Lift) -> list[int]:
    """Of the rows admitted, the self-test's left out."""
    return [new.seed for plan in server.runner.plans for new in plan.admit][1:]


def prompt_of(usage: object) -> tuple[int, int]:
    assert isinstance(usage, dict)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


async def test_each_choice_is_the_answer_of_its_own_seed() -> None:
    async with lift() as server:
        body = (await server.chat(n=3, **WARM)).json()
        used = seeds(server)
        alone = [(await server.chat(**{**WARM, "seed": seed})).json() for seed in used]
        single = (await server.chat(**WARM)).json()
    answer = ChatCompletion.model_validate(body, strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [each["choices"][0]["message"]["content"] for each in alone]
    assert len(set(texts)) == 3
    assert used == [5, sibling_seed(5, 1), sibling_seed(5, 2)]
    assert texts[0] == single["choices"][0]["message"]["content"]
    assert prompt_of(body["usage"]) == (prompt_of(single["usage"])[0], 18)


def test_seeds_of_siblings_are_fixed_and_differ() -> None:
    """Fixed: a seed draws the same answers after an upgrade."""
    assert sibling_seed(5, 1) == 12099282195316335764
    assert (
        len({sibling_seed(seed, index) for seed in (-1, 0, 1, 11, 2**64 - 1) for index in range(1, 112)})
        == 555
    )


async def test_choices_without_a_seed_differ() -> None:
    async with lift() as server:
        body = (await server.chat(n=4, temperature=1, max_tokens=8)).json()
        assert len(set(seeds(server))) == 4
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 4


async def test_greedy_choices_are_equal() -> None:
    async with lift() as server:
        body = (await server.complete(n=2, max_tokens=4)).json()
    assert body["choices"][0]["text"] == body["choices"][1]["text"]


async def test_a_chat_streams_its_choices() -> None:
    more: JSON = {"n": 2, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}, **WARM}
    async with lift() as server:
        chunks = stream_of(await server.chat(**more))
        whole = (await server.chat(n=2, **WARM)).json()
    texts, roles, reasons = ["", ""], ["", ""], ["", ""]
    for chunk in chunks:
        for choice in ChatCompletionChunk.model_validate(chunk, strict=True).choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert (roles, reasons) == (["assistant"] * 2, ["length"] * 2)
    assert chunks[-1]["usage"] == whole["usage"]


async def test_every_prompt_gets_n_choices() -> None:
    def prompts_letter(row: FakeRow) -> int:
        return row.tokens[0]

    more: JSON = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 3, "echo": True}
    async with lift(FakeRunner(prompts_letter)) as server:
        body = (await server.complete(**more)).json()
        chunks = stream_of(await server.complete(**more, stream=True, stream_options={"include_usage": True}))
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "abaaa"), (1, "abaaa"), (2, "cdeccc"), (3, "cdeccc")]
    assert prompt_of(body["usage"]) == (2 + 3, 4 * 3)
    streamed = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            streamed[choice["index"]] += choice["text"]
    assert streamed == [text for _, text in texts]
    assert chunks[-1]["usage"] == body["usage"]


class Scored(FakeRunner):
    """Rows answer their number among all rows as a digit, then a letter for each of its tokens, at chosen log
    probabilities."""

    def __init__(self, logprobs: list[list[float]]) -> None:
        super().__init__(self._token)
        self._logprobs = logprobs

    def _token(self, row: FakeRow) -> int:
        number = row.new.row - 2  # the self-test was the first
        if number < 0 or row.drawn >= len(self._logprobs[number]):
            return EOS
        return ord("0") + number if row.drawn == 0 else ord("x")

    def _sample(self, row: FakeRow) -> Sample:
        number, at = row.new.row - 2, row.drawn
        token = super()._sample(row)
        if token.logprob is None or number < 0:
            return token
        value = [*self._logprobs[number], -1.0, -1.0][at]
        return Sample(token.token, value, ((token.token, value),) if token.top else ())


MEANS = [[-3.0, -3.0], [-1.0] * 5, [-0.5, -4.0], [-0.2]]
"""Means with the end's -1: -7/3, -1, -11/6, -0.6."""


async def test_best_of_shows_the_highest_logprob_per_token() -> None:
    async with lift(Scored(MEANS)) as server:
        body = (await server.complete(n=2, best_of=4)).json()
    answer = Completion.model_validate(body, strict=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "3"), (1, "1xxxx")]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert prompt_of(body["usage"]) == (2, 3 + 6 + 3 + 2)


async def test_best_of_for_each_prompt_with_logprobs_and_echo() -> None:
    async with lift(Scored(MEANS)) as server:
        body = (await server.complete(prompt=["ab", "cd"], best_of=2, logprobs=1)).json()
    async with lift(Scored(MEANS)) as server:
        echoed = (await server.complete(prompt=["ab", "cd"], best_of=2, echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["1xxxx", "3"]
    assert body["choices"][1]["logprobs"]["token_logprobs"] == [-0.2, -1.0]
    assert prompt_of(body["usage"]) == (4, 14)
    assert [choice["text"] for choice in echoed["choices"]] == ["ab1xxxx", "cd3"]


async def test_best_of_n_is_n() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        body = (await server.complete(n=2, best_of=2)).json()
        chunks = stream_of(await server.complete(n=2, best_of=2, stream=True))
        assert all(new.sampling.logprobs is None for plan in server.runner.plans for new in plan.admit), (
            "nothing is ranked"
        )
    assert [choice["text"] for choice in body["choices"]] == ["a", "a"]
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 65, "prompt": ["a", "b"]}, "best_of"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"best_of": 1.5}, "best_of"),
    ],
)
async def test_what_completions_refuse(more: JSON, param: str) -> None:
    async with lift() as server:
        error = error_of(await server.complete(**more), 400)
        assert (error["param"], server.engine.stats().prompt_tokens) == (param, 0)


async def test_choices_come_all_or_none() -> None:
    async with lift(config=EngineConfig(max_num_seqs=1, max_waiting=1)) as server:
        assert error_of(await server.chat(n=3), 429)["code"] == "queue_full"
        await server.until_idle()
        assert server.engine.stats().waiting == 0
    async with lift(context_length=8) as server:
        assert error_of(await server.complete(prompt="a" * 9, n=2), 400)["param"] == "prompt"
        error = error_of(await server.complete(prompt=["a", "b" * 9], n=2), 400)
        assert error["param"] == "prompt[1]"


async def test_a_choice_that_fails_fails_the_answer() -> None:
    class SecondFails(FakeRunner):
        def step(self, plan: StepPlan) -> StepResult | None:
            result = super().step(plan)
            if result is None or 3 not in result.samples:
                return result
            samples = {row: sample for row, sample in result.samples.items() if row != 3}
            self.rows.pop(3, None)
            return StepResult(result.number, samples, failed={3: "no"})

    runner = SecondFails()
    async with lift(runner) as server:
        error_of(await server.chat(n=2, max_tokens=50), 500)
        await server.until_idle()
        assert server.engine.stats().running == 0


async def test_choices_that_fail_together_are_all_heard(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    async with lift(runner) as server:
        runner.fault = lambda plan: Fault(fail=all_rows) if len(plan.decode) == 3 else None
        error_of(await server.chat(n=3, max_tokens=50), 500)
        await server.until_idle()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
