"""Compiled decode steps: solo answers, what is compiled when, and a model that cannot be."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from chairlift.cache.batch import RowBatch
from chairlift.cache.traced import Decode
from chairlift.engine.batching import Batching
from chairlift.engine.compiled import AFTER, CompiledSteps
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


def test_who_joins_and_leaves_changes_no_shape() -> None:
    """Into slots that there are, and while few enough of them are free."""
    runner = runner_with("llama", lambda forward: CompiledSteps(forward, after=0))
    lengths = (40, 40, 40, 40, 16, 7, 40)
    stepper = Stepper(runner, *(Rider(prompt(5 + n, n), tokens) for n, tokens in enumerate(lengths)))
    stepper.run(1 + 20)
    stepper.riders.append(Rider(prompt(30, 9), 9))
    stepper.run(16)
    assert runner.stats().step_compilations == 1
    assert runner.stats().compiled_steps == 35  # all but the one that a prompt is in
    for rider in stepper.riders[4:6]:
        assert tuple(rider.drawn) == solo("llama").answer(rider.prompt, rider.tokens).tokens[: rider.tokens]
    (last,) = stepper.riders[7:]
    assert tuple(last.drawn) == solo("llama").answer(last.prompt, 9).tokens[:9]


def test_a_step_with_many_free_slots_is_computed_as_ever() -> None:
    runner = runner_with("llama", lambda forward: CompiledSteps(forward, after=0, compile=as_it_is))
    tokens = [40] * 8 + [6, 6, 6, 6, 12]
    stepper = Stepper(runner, *(Rider(prompt(5, n), count) for n, count in enumerate(tokens)))
    stepper.run(1 + 10)  # 9 rows in 13 slots since the sixth token: fewer than 1.5 to a row
    computed = runner.stats().compiled_steps
    assert computed == 10
    stepper.run(6)  # 8 rows since the twelfth
    assert runner.stats().compiled_steps == computed + 1


@pytest.mark.parametrize("way", ["evicted", "closed"])
def test_what_was_compiled_is_freed(way: str) -> None:
    """Nothing but the steps' own table holds a compiled step, and with it what the trace refers to."""

    class Weights:
        def __init__(self) -> None:
            self.array = mx.random.normal((1 << 20,), key=mx.random.key(0))
            mx.eval(self.array)

    def forward(tokens: mx.array, caches: list[Any]) -> mx.array:
        keys = mx.ones((tokens.shape[0], 1, 1, 8))
        caches[0].update_and_fetch(keys, keys)
        weights = Weights()  # of this trace alone
        traces.append(weakref.ref(weights))
        return caches[0].attend(keys, scale=1.0, mask=None)[:, :, 0, :1] + weights.array[:3]

    def step(rows: int) -> None:
        batch = RowBatch([KVCache()])
        for row in range(rows):
            cache = KVCache()
            cache.update_and_fetch(*(mx.ones((1, 1, 4, 8)) for _ in range(2)))
            batch.change(join={row: ([cache], 4)})
        logits = steps.attempt(batch, batch.begin(), mx.zeros(rows, dtype=mx.int32))
        assert logits is not None
        mx.eval(logits)

    traces: list[weakref.ref[Weights]] = []
    size = 4 << 20
    steps = CompiledSteps(forward, after=0, most=1)
    before = mx.get_active_memory()
    step(1)
    assert len(traces) == 1 and traces[0]() is None
    assert size <= mx.get_active_memory() - before < 1.5 * size  # the compiled step keeps them
    step(2)
    assert size <= mx.get_active_memory() - before < 1.5 * size  # now those of the second alone
    if way == "closed":
        steps.close()
        assert mx.get_active_memory() - before < size / 2


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
    Stepper(runner, Rider(prompt(5, 1), AFTER + 5)).run()
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
