"""Log probabilities of prompts, in a moving batch: those of one forward over the whole prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.models.build import make_runner
from chairlift.engine.plan import PromptPart, Runner, Sample, StepPlan, StepResult
from chairlift.engine.prompt_scores import PIECE, pieces_of, score
from chairlift.engine.request import SamplingParams
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import Lift, Ride, differences
from tests.mlx.parity import finding, solo
from tests.mlx.solo import prompt, upstream_as_it_is

SCORED = SamplingParams(temperature=0, logprobs=1, prompt_logprobs=3)
LONG = 2 * PIECE + 40
RIDES = (
    Ride(prompt(LONG, 1), sampling=SCORED, tokens=3),
    Ride(prompt(9, 2), tokens=20),
    Ride(prompt(70, 3), join=2, chunks=(7,), sampling=SCORED, tokens=4),
    Ride(prompt(33, 4), join=3, chunks=(20,), tokens=6),
    Ride(prompt(LONG, 5), join=1, chunks=(150, 3), preempt=(3, 6), sampling=SCORED, tokens=5),
    Ride(prompt(2, 6), join=4, sampling=replace(SCORED, prompt_logprobs=0)),
    Ride(prompt(1, 7), join=4, sampling=SCORED),
)
Rows = npt.NDArray[np.float64]


class Recording:
    """A runner whose scores are kept, by row, as a scheduler's row takes them in."""

    def __init__(self, runner: Runner) -> None:
        self.scores: dict[int, list[Sample]] = {}
        self._runner = runner

    def step(self, plan: StepPlan) -> StepResult | None:
        result = self._runner.step(plan)
        for row, parts in result.scored.items() if result is not None else ():
            self._take(row, parts)
        return result

    def _take(self, row: int, parts: Sequence[PromptPart]) -> None:
        for part in parts:
            self.scores.setdefault(row, [])[part.start - 1 :] = part.samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@cache
def expected(name: str, tokens: tuple[int, ...]) -> Rows:
    """Log probabilities `[tokens, vocab]`, the normalisation in float64."""
    with upstream_as_it_is():
        logits = solo(name).model(mx.array([tokens]))[0]
        mx.eval(logits)
    rows = np.array(logits.astype(mx.float32)).astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)))


def check(name: str, tokens: tuple[int, ...], got: Sequence[Sample], wanted: int) -> None:
    assert [sample.token for sample in got] == list(tokens[1:])
    rows = expected(name, tokens)
    for at, sample in enumerate(got):
        assert sample.logprob == pytest.approx(rows[at, sample.token], abs=1e-4)
        best = np.sort(rows[at])[::-1][:wanted]
        assert [value for _, value in sample.top] == pytest.approx(list(best), abs=1e-4)
        assert [rows[at, id] for id, _ in sample.top] == pytest.approx(list(best), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "batching"),
    [
        ("llama", None),
        ("qwen3_5", None),
        ("llama", Batching.DENSE),
        ("llama", Batching.SOLO),
        ("gemma3_text", None),
    ],
)
def test_scores_in_a_moving_batch_equal_those_alone(name: str, batching: Batching | None) -> None:
    runner = Recording(make_runner(solo(name).model, VOCABULARY, batching or finding(name).batching)[1])
    lift = Lift(runner)
    answers = lift.run(RIDES)
    assert lift.failures == {} and differences(solo(name), RIDES, answers) == []
    assert sorted(runner.scores) == [1, 3, 5, 6]  # rows count from 1; one token alone has none
    for row, scores in runner.scores.items():
        ride = RIDES[row - 1]
        check(name, ride.prompt, scores, ride.sampling.prompt_logprobs or 0)


def test_no_more_logits_are_computed_at_once_than_of_a_piece() -> None:
    model = solo("llama").model
    lengths: list[int] = []
    inner = make_runner(model, VOCABULARY, finding("llama").batching)[1]
    forward = inner._chunks._forward

    def watched(tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        lengths.append(tokens.shape[1])
        return forward(tokens, caches, **told)

    inner._chunks._forward = watched
    Lift(inner).run(RIDES[:1])
    assert lengths == [PIECE, PIECE, LONG - 2 * PIECE - 1]


def test_pieces() -> None:
    tokens = tuple(range(2 * PIECE + 1))
    assert pieces_of([tokens, (7,), ()]) == [tokens[:PIECE], tokens[PIECE : 2 * PIECE], tokens[-1:], (7,)]


def test_what_is_behind_the_prompt_is_not_scored() -> None:
    logits = mx.random.normal((4, VOCABULARY))
    part = score(logits, range(10, 16), 3, 1)
    assert part is not None and (part.start, part.tokens) == (4, (14, 15))
    assert score(logits, range(10, 16), 5, 1) is None


def test_a_score_that_is_not_a_number_is_no_score() -> None:
    part = score(mx.full((1, VOCABULARY), mx.nan), (1, 2), 0, 0)
    assert part is not None and part.read() is None
