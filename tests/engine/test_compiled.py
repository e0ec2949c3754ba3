"""Compiled decode steps: solo answers, what is compiled when, and a model that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from chairlift.cache.batch import RowBatch
from chairlift.cache.traced import Decode
from chairlift.engine.batching import Batching
from chairlift.engine.compiled import CompiledSteps
from chairlift.engine.models.build import make_runner
from chairlift.engine.runner import MlxRunner
from tests.engine.stepping import Rider, Stepper
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, build
from tests.mlx.lift import Lift, differences
from tests.mlx.parity import solo
from tests.mlx.schedules import FULL
from tests.mlx.solo import prompt

LOGGER = "chairlift.engine.compiled"


def as_it_is(decode: Decode) -> Decode:
    return decode


def runner_with(family: str, steps: Callable[[Any], CompiledSteps]) -> MlxRunner:
    runner = make_runner(solo(family).model, VOCABULARY, Batching.FLAT, compiled=False)[1]
    runner._compiled = steps(runner._forward)
    return runner


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rides_of_every_kind_get_their_solo_answers(family: str) -> None:
    """Really compiled: rows that join, leave, come back, and outgrow their cohort; full attention and
    windows."""
    runner = runner_with(family, lambda forward: CompiledSteps(forward, after=0))
    lift = Lift(runner)
    answers = lift.run(FULL)
    assert not lift.failures
    assert not differences(solo(family), FULL, answers)
    stats = runner.stats()
    assert (stats.rows, stats.kv_bytes) == (0, 0)
    assert 0 < stats.step_compilations < stats.compiled_steps


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mixtral", "cohere2", "gemma3n"])
def test_every_step_as_a_function_of_arrays(family: str) -> None:
    """Not compiled, for breadth: from the first step of each shape."""
    runner = runner_with(family, lambda forward: CompiledSteps(forward, after=0, compile=as_it_is))
    lift = Lift(runner)
    answers = lift.run(FULL)
    assert not lift.failures
    assert not differences(solo(family), FULL, answers)
    assert runner.stats().compiled_steps > 10


def test_a_shape_is_compiled_when_it_has_been_seen_a_few_times() -> None:
    runner = runner_with("llama", lambda forward: CompiledSteps(forward, after=3, compile=as_it_is))
    stepper = Stepper(runner, Rider(prompt(5, 1), 40))
    stepper.run(1 + 3)
    assert (runner.stats().step_compilations, runner.stats().compiled_steps) == (0, 0)
    stepper.run(5)
    assert runner.stats().compiled_steps == 5


def test_one_compilation_a_shape() -> None:
    runner = runner_with("llama", lambda forward: CompiledSteps(forward, after=0))
    stepper = Stepper(runner, Rider(prompt(5, 1), 40))
    stepper.run(1 + 6)
    assert (runner.stats().step_compilations, runner.stats().compiled_steps) == (1, 6)
    stepper.riders.append(Rider(prompt(9, 1), 9))
    stepper.run()  # a step of both in between, then as at first
    assert runner.stats().step_compilations == 2
    for rider in stepper.riders:
        want = solo("llama").answer(rider.prompt, rider.tokens).tokens[: rider.tokens]
        assert tuple(rider.drawn) == want


def test_the_shapes_seen_longest_ago_are_forgotten() -> None:
    steps: list[CompiledSteps] = []

    def bounded(forward: Any) -> CompiledSteps:
        steps.append(CompiledSteps(forward, after=0, most=2))
        return steps[0]

    runner = runner_with("llama", bounded)
    rounds = ((1, 2, 1), (1, 2, 3, 1))
    for rows in rounds:
        for count in rows:
            Stepper(runner, *(Rider(prompt(5, seed), 6) for seed in range(count))).run()
            assert len(steps[0]._seen) <= 2
    # One and two rows; then three, which pushes out one, and one again, which pushes out two.
    assert runner.stats().step_compilations == 4


def test_blocks_are_written_in_place() -> None:
    """Nothing in the runner keeps what a step before has left."""

    def places() -> list[int]:
        runner._settle()
        batch = runner._residents.batch
        assert isinstance(batch, RowBatch)
        return [np.asarray(array).__array_interface__["data"][0] for array in batch.arrays()]

    runner = runner_with("llama", lambda forward: CompiledSteps(forward, after=0))
    stepper = Stepper(runner, *(Rider(prompt(length, 1), 20) for length in (130, 140)))
    stepper.run(3)
    before = places()
    for _ in range(4):
        stepper.run(1)
        assert places() == before
    assert runner.stats().compiled_steps == 6


def test_a_model_that_cannot_be_compiled_is_served_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    def fails(forward: Any) -> CompiledSteps:
        def reads(tokens: mx.array, caches: list[Any]) -> mx.array:
            caches[0].offset.tolist()
            logits: mx.array = forward(tokens, caches)
            return logits

        return CompiledSteps(reads, after=2)

    runner = runner_with("llama", fails)
    stepper = Stepper(runner, *(Rider(prompt(length, 1), 12) for length in (5, 40)))
    with caplog.at_level(logging.WARNING, LOGGER):
        stepper.run()
    for rider in stepper.riders:
        assert rider.failed is None and not rider.losses
        want = solo("llama").answer(rider.prompt, rider.tokens).tokens[: rider.tokens]
        assert tuple(rider.drawn) == want
    assert (runner.stats().step_compilations, runner.stats().compiled_steps) == (1, 0)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "decode steps are no longer compiled"
    ]


def test_a_failure_in_mid_model_leaves_the_rows_as_they_were() -> None:
    """The last layer raises when all others have stored their keys."""

    def fails(forward: Any) -> CompiledSteps:
        def late(tokens: mx.array, caches: list[Any]) -> mx.array:
            forward(tokens, caches)
            raise RuntimeError("late")

        return CompiledSteps(late, after=0)

    runner = runner_with("llama", fails)
    stepper = Stepper(runner, Rider(prompt(9, 1), 12))
    stepper.run()
    (rider,) = stepper.riders
    assert tuple(rider.drawn) == solo("llama").answer(rider.prompt, 12).tokens[:12]
    assert not rider.losses


def test_a_runner_that_closes_lets_the_model_go() -> None:
    runner = make_runner(build(FAMILIES["llama"]), VOCABULARY, Batching.FLAT, compiled=True)[1]
    Stepper(runner, Rider(prompt(5, 1), 9)).run()
    compiled = runner._compiled
    assert not compiled.closed and compiled.compilations == 1
    runner.close()
    assert compiled.closed and not compiled._seen
    with pytest.raises(RuntimeError, match="closed"):
        compiled._forward(mx.zeros((1, 1)), [])


@pytest.mark.parametrize(("family", "compiled"), [("llama", None), ("llama", False), ("qwen3_5", True)])
def test_who_is_not_compiled(family: str, compiled: bool | None) -> None:
    """On a CPU nobody unless asked for; no hybrid."""
    assert make_runner(solo(family).model, VOCABULARY, compiled=compiled)[1]._compiled.closed
