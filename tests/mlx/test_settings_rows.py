"""Sixteen rows, each with settings of its own: every one gets its solo answer, and after preemption too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from chairlift.engine.constraints import Json, Regex
from chairlift.engine.models.build import make_runner
from chairlift.engine.plan import Sample
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.sampling import Marks
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import Lift, Ride
from tests.mlx.parity import finding, solo
from tests.mlx.solo import prompt, upstream_as_it_is
from tests.mlx.test_prefix import Server
from tests.vocabularies import toy_compiler

MARKS = Marks(eos=frozenset({3, 5}), line_breaks=(7,))
EVERYTHING = SamplingParams(
    temperature=1.3,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    xtc_probability=0.5,
    xtc_threshold=0.05,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={9: 3.0, 11: -100.0},
    min_tokens=6,
    stop_token_ids=(8,),
    logprobs=3,
)
SETTINGS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, frequency_penalty=-1.5),
    SamplingParams(temperature=0, presence_penalty=-2.0, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0, repetition_penalty=0.5, frequency_penalty=2.0),
    SamplingParams(temperature=0, logit_bias={4: 90.0, 3: 100.0}, min_tokens=5),
    SamplingParams(temperature=0, allowed_token_ids=(1, 2, 3, 30), min_tokens=4, logprobs=0),
    SamplingParams(temperature=1.0, presence_penalty=0.5),
    SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.3),
    SamplingParams(temperature=1.5, xtc_probability=1.0, xtc_threshold=0.02),
    SamplingParams(temperature=1.0, xtc_probability=0.5, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=tuple(range(50, 90))),
    SamplingParams(temperature=2.0, min_p=0.2, presence_penalty=1.0, logprobs=20),
    SamplingParams(temperature=1.0, top_k=3, logit_bias=dict.fromkeys(range(20), 2.5)),
    EVERYTHING,
    replace(EVERYTHING, allowed_token_ids=tuple(range(5, 60)), logprobs=None),
)
CONSTRAINTS = {
    7: toy_compiler().compile(Json('{"type": "array", "items": {"type": "integer"}}'), "schema"),
    12: toy_compiler().compile(Regex("(w1|w2|ab)+"), "pattern"),
}
LENGTHS = (12, 40, 3, 70, 12, 25, 9, 33)
RIDES = tuple(
    Ride(
        prompt(LENGTHS[index % len(LENGTHS)], index),
        join=index // 3,
        tokens=10 + index % 5,
        chunks=(7,) if index % 4 == 1 else (512,),
        sampling=sampling,
        seed=index // 2,
        constraint=CONSTRAINTS.get(index),
    )
    for index, sampling in enumerate(SETTINGS)
)
STOPPED = tuple(replace(ride, preempt=(ride.join + 5 + index % 3, 13)) for index, ride in enumerate(RIDES))


def lift(name: str) -> Lift:
    return Lift(make_runner(solo(name).model, VOCABULARY, finding(name).batching, marks=MARKS)[1])


def seen(answers: Sequence[Sequence[Sample]]) -> list[list[tuple[int, list[int]]]]:
    """Tokens, drawn and most probable."""
    return [[(sample.token, [token for token, _ in sample.top]) for sample in row] for row in answers]


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_sixteen_rows_with_different_settings_equal_their_solo_answers(name: str) -> None:
    runner = lift(name)
    alone = [runner.run([ride])[0] for ride in RIDES]
    together = runner.run(RIDES)
    stopped = runner.run(STOPPED)
    assert [len(row) for row in alone] == [ride.tokens for ride in RIDES]
    assert seen(together) == seen(alone)
    assert seen(stopped) == seen(alone)
    plain = runner.run([replace(ride, sampling=SamplingParams(temperature=0)) for ride in RIDES[:7]])
    differ = [index for index in range(1, 7) if seen(together)[index] != seen(plain)[index]]
    assert differ == [1, 2, 3, 4, 5, 6], "every setting changes its answer"


def penalized(logits: np.ndarray, params: SamplingParams, known: list[int], drawn: list[int]) -> np.ndarray:
    """In float64, token by token: OpenAI's formula, and CTRL's over prompt and answer."""
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in {*known, *drawn}:
        values[token] *= params.repetition_penalty if values[token] <= 0 else 1 / params.repetition_penalty
    for token in set(drawn):
        values[token] -= params.frequency_penalty * drawn.count(token) + params.presence_penalty
    return values


@pytest.mark.parametrize("index", [1, 2, 3, 4])
def test_greedy_answers_are_those_of_upstream_with_the_formula(index: int) -> None:
    """mlx-lm's own loop, one request, the penalties computed from the tokens."""
    ride = RIDES[index]
    drawn: list[int] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        drawn[:] = [int(token) for token in np.array(tokens)[len(ride.prompt) :]]
        values = penalized(np.array(logits[0]), ride.sampling, list(ride.prompt), drawn)
        return mx.array(values.astype(np.float32))[None]

    with upstream_as_it_is():
        steps = generate_step(
            mx.array(ride.prompt), solo("llama").model, max_tokens=ride.tokens, logits_processors=[processor]
        )
        want = [int(token) for token, _ in steps]
    assert [sample.token for sample in lift("llama").run(RIDES)[index]] == want


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_answers_to_one_prompt_share_its_computation(name: str) -> None:
    """What `n` becomes: each answers as alone from the start, penalties over the prompt included."""
    tokens = prompt(150)
    alone = [lift(name).run([Ride(tokens, tokens=8, sampling=EVERYTHING, seed=seed)])[0] for seed in range(4)]
    server = Server.of(make_runner(solo(name).model, VOCABULARY, finding(name).batching, marks=MARKS)[1])
    sampling = replace(EVERYTHING, max_tokens=8)
    rows = [server.scheduler.add(Request("r", tokens, sampling), seed) for seed in range(4)]
    server.answers.update({row: [] for row in rows})
    server.finish()
    assert rows[0].cached == 0 and all(row.cached >= 128 for row in rows[1:])
    assert seen([server.answers[row] for row in rows]) == seen(alone)
