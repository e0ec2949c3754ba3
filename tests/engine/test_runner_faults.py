"""What goes wrong in a step, and that it stays with the rows it concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.batching import Batching
from chairlift.engine.flight import Flight
from chairlift.engine.models.build import make_runner
from chairlift.engine.runner import MlxRunner
from chairlift.engine.sampling import Marks
from chairlift.patches import apply_patches
from tests.engine.stepping import Rider, Stepper
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, build
from tests.mlx.parity import solo
from tests.mlx.solo import prompt

FAMILY = {
    Batching.FLAT: "llama",
    Batching.HYBRID: "qwen3_5",
    Batching.DENSE: "llama",
    Batching.ROWS: "llama",
    Batching.SOLO: "llama",
}
FLAT_STEPS = (Batching.FLAT, Batching.ROWS)
MESSAGE = "The model step failed (Boom)."


class Boom(RuntimeError):
    pass


class Faulty:
    """A model whose forwards fail when told to, behind the last layer: all caches have moved by then."""

    def __init__(self, batching: Batching) -> None:
        apply_patches()
        self.model = solo(FAMILY[batching]).model
        self.trigger: Callable[[mx.array], bool] | None = None
        self.runner = MlxRunner(self, lambda: list(make_prompt_cache(self.model)), batching)

    def __call__(self, tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        logits: mx.array = self.model(tokens, cache=caches, **told)
        if self.trigger is None or not self.trigger(tokens):
            return logits
        self.trigger = None
        raise Boom


def riders(batching: Batching, *lengths: int, tokens: int = 8) -> list[Rider]:
    return [Rider(prompt(length, 1), tokens) for length in lengths]


def assert_solo(batching: Batching, *rows: Rider) -> None:
    for rider in rows:
        assert rider.failed is None
        want = solo(FAMILY[batching]).answer(rider.prompt, rider.tokens).tokens
        assert tuple(rider.drawn) == want[: rider.tokens]


def assert_empty(runner: MlxRunner) -> None:
    assert (runner.stats().rows, runner.stats().kv_bytes) == (0, 0)


def once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next call of a function of mlx.core raises."""
    original = getattr(mx, name)

    def fail(*_: Any) -> None:
        monkeypatch.setattr(mx, name, original)
        raise Boom

    monkeypatch.setattr(mx, name, fail)


@pytest.mark.parametrize(
    ("batching", "where"),
    [(batching, "in the model") for batching in Batching if batching is not Batching.SOLO]
    + [(batching, "on the way to the device") for batching in Batching],
)
def test_a_fault_in_decode_loses_the_rows_and_they_start_again(
    batching: Batching, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty(batching)
    stepper = Stepper(faulty.runner, *riders(batching, 5, 9, 1))
    stepper.run(3)
    if where == "in the model":
        faulty.trigger = lambda tokens: tokens.shape == (3, 1)
    else:
        once(monkeypatch, "async_eval")
    stepper.run(1)
    assert_empty(faulty.runner)
    stepper.run()
    assert [rider.losses for rider in stepper.riders] == [[MESSAGE]] * 3
    assert_solo(batching, *stepper.riders)
    assert_empty(faulty.runner)


@pytest.mark.parametrize("batching", FLAT_STEPS)
def test_a_fault_in_a_flat_step_fails_who_prefills_and_loses_who_decodes(batching: Batching) -> None:
    faulty = Faulty(batching)
    old, new = riders(batching, 5, 9), riders(batching, 12, 3)
    waiting = Rider(prompt(40, 1), 8, chunk=10)
    stepper = Stepper(faulty.runner, *old)
    stepper.run(3)
    stepper.riders += new
    faulty.trigger = lambda tokens: tokens.shape == (2 + 12 + 3, 1)
    stepper.run(1)
    stepper.riders.append(waiting)
    stepper.run()
    assert [rider.failed for rider in new] == [MESSAGE] * 2
    assert [rider.losses for rider in old] == [[MESSAGE]] * 2
    assert_solo(batching, *old, waiting)
    assert_empty(faulty.runner)


@pytest.mark.parametrize("batching", [Batching.HYBRID, Batching.DENSE, Batching.SOLO])
def test_a_fault_in_a_prefill_fails_that_row_alone(batching: Batching) -> None:
    faulty = Faulty(batching)
    old, new = riders(batching, 5, 9), riders(batching, 12, 7)
    stepper = Stepper(faulty.runner, *old)
    stepper.run(3)
    stepper.riders += new
    faulty.trigger = lambda tokens: tokens.shape == (1, 11)
    stepper.run()
    assert new[0].failed == MESSAGE
    assert not any(rider.losses for rider in (*old, new[1]))
    assert_solo(batching, *old, new[1])
    assert_empty(faulty.runner)


@pytest.mark.parametrize("batching", [Batching.HYBRID, Batching.DENSE])
def test_a_fault_in_decode_leaves_rows_that_prefill_alone(batching: Batching) -> None:
    """Their caches are their own; one whose prompt is through already is in the step that fails."""
    faulty = Faulty(batching)
    old = riders(batching, 5, 9)
    long, through, first = Rider(prompt(40, 1), 8, chunk=15), *riders(batching, 6, 1)
    stepper = Stepper(faulty.runner, *old)
    stepper.run(3)
    stepper.riders += [long, through, first]
    faulty.trigger = lambda tokens: tokens.shape == (3, 1)
    stepper.run()
    assert [bool(rider.losses) for rider in (*old, long, through, first)] == [True, True, False, True, False]
    assert_solo(batching, *stepper.riders)
    assert_empty(faulty.runner)


def test_a_result_that_cannot_be_read_loses_its_step_and_the_runner_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Faulty(Batching.FLAT).runner
    stepper = Stepper(runner, *riders(Batching.FLAT, 5, 9))
    stepper.run(3)
    original = Flight.read

    def read(_: Flight) -> None:
        monkeypatch.setattr(Flight, "read", original)
        raise Boom

    monkeypatch.setattr(Flight, "read", read)
    stepper.run()
    assert all(MESSAGE in rider.losses for rider in stepper.riders)
    assert_solo(Batching.FLAT, *stepper.riders)
    assert_empty(runner)


def test_a_row_that_cannot_begin_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constraint or its settings make nothing to follow, say."""
    runner = Faulty(Batching.FLAT).runner
    stepper = Stepper(runner, *riders(Batching.FLAT, 5))
    stepper.run(3)
    original = Marks.shaping

    def shaping(*_: Any) -> None:
        monkeypatch.setattr(Marks, "shaping", original)
        raise Boom

    monkeypatch.setattr(Marks, "shaping", shaping)
    stepper.riders += riders(Batching.FLAT, 9)
    stepper.run()
    assert [rider.losses for rider in stepper.riders] == [[], ["The row's state is gone."]]
    assert_solo(Batching.FLAT, *stepper.riders)
    assert_empty(runner)


def test_a_fault_in_a_solo_row_is_its_own() -> None:
    faulty = Faulty(Batching.SOLO)
    stepper = Stepper(faulty.runner, *riders(Batching.SOLO, 5, 9, 3))
    stepper.run(3)
    calls: list[int] = []

    def second(tokens: mx.array) -> bool:
        calls.append(1)
        return len(calls) == 2

    faulty.trigger = second
    stepper.run()
    assert stepper.riders[1].failed == MESSAGE
    assert_solo(Batching.SOLO, stepper.riders[0], stepper.riders[2])
    assert_empty(faulty.runner)


@pytest.mark.parametrize("batching", Batching)
def test_a_result_that_cannot_be_computed_loses_its_step_and_the_next(
    batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next was launched on its arrays. A row that took part in neither goes on."""
    runner = Faulty(batching).runner
    stepper = Stepper(runner, *riders(batching, 5, 9))
    stepper.run(3)
    once(monkeypatch, "eval")
    had = [len(rider.samples) for rider in stepper.riders]
    stepper.riders.append(Rider(prompt(6, 1), 8))
    landed = stepper.step()
    assert landed is not None and landed.samples == {} and landed.lost.keys() == {1, 2}
    assert [len(rider.samples) for rider in stepper.riders[:2]] == had
    assert_empty(runner)
    landed = stepper.step()
    assert landed is not None and landed.lost.keys() == {1, 2, 3}
    stepper.run()
    assert_solo(batching, *stepper.riders)
    assert_empty(runner)


def poisoned(name: str, token: int) -> Any:
    """A model of the family whose embedding of one token is not a number."""
    model = build(FAMILIES[name])
    ((path, embedding),) = (
        (path, array)
        for path, array in tree_flatten(model.parameters())
        if path.endswith("embed_tokens.weight")
    )
    rows = mx.arange(VOCABULARY)[:, None] == token
    model.load_weights([(path, mx.where(rows, mx.nan, embedding))], strict=False)
    return model


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("late", [False, True], ids=["in a prompt", "in an answer"])
def test_a_row_that_is_not_a_number_fails_alone(batching: Batching, late: bool) -> None:
    """And leaves nothing behind for the rows that take its place."""
    name = "gpt_oss" if batching is Batching.FLAT else FAMILY[batching]
    reference = solo(name)
    clean = [Rider(prompt(length, 7), 14) for length in (30, 31, 32)]
    after = [Rider(prompt(length, 8), 8) for length in (1, 5, 9)]
    want = {
        rider: reference.answer(rider.prompt, rider.tokens).tokens[: rider.tokens]
        for rider in (*clean, *after)
    }
    used = {token for rider, tokens in want.items() for token in (*rider.prompt, *tokens)}
    poison = min(set(range(VOCABULARY)) - used)
    runner = make_runner(poisoned(name, poison), VOCABULARY, batching)[1]
    bad = Rider((*clean[0].prompt, *clean[1].prompt, *([] if late else [poison])), 14)
    stepper = Stepper(runner, clean[0], bad, *clean[1:])
    stepper.run(2)
    if late:
        put(runner, bad, poison)
    stepper.run(3)
    assert bad.failed == "The model's output is not a number for this request."
    stepper.riders += after
    stepper.run()
    for rider, tokens in want.items():
        assert rider.failed is None and rider.losses == []
        assert tuple(rider.drawn) == tokens
    assert_empty(runner)


def put(runner: MlxRunner, rider: Rider, token: int) -> None:
    """Make `token` the one that the row feeds next."""
    assert rider.row is not None
    state = runner._residents.rows[rider.row]
    if state.caches is not None:
        state.pending = mx.array(token, dtype=mx.int32)
        return
    at = runner._residents.order.index(rider.row)
    assert runner._residents.pending is not None
    index = mx.array(np.arange(len(runner._residents.order)) == at)
    runner._residents.pending = mx.where(index, token, runner._residents.pending)


def test_a_model_that_raises_always_fails_rows_and_the_runner_lives() -> None:
    faulty = Faulty(Batching.FLAT)

    def forward(tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        raise Boom

    runner = MlxRunner(forward, lambda: list(make_prompt_cache(faulty.model)), Batching.FLAT)
    stepper = Stepper(runner, *riders(Batching.FLAT, 5, 9))
    stepper.run()
    assert [rider.failed for rider in stepper.riders] == [MESSAGE] * 2
    assert_empty(runner)
