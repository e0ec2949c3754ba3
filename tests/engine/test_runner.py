"""The runner over small real models: look-ahead, rows that come and go, seeds, log probabilities, memory."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.batching import Batching
from chairlift.engine.models.build import make_runner
from chairlift.engine.plan import NewRow, Span, StepPlan
from chairlift.engine.request import SamplingParams
from chairlift.engine.runner import MlxRunner
from chairlift.engine.sampling import Draw, row_key, sample
from tests.engine.stepping import GREEDY, Rider, Stepper, answers
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
SHARED = [batching for batching in Batching if batching is not Batching.SOLO]


def runner_of(batching: Batching) -> MlxRunner:
    return make_runner(solo(FAMILY[batching]).model, VOCABULARY, batching)[1]


@cache
def alone(batching: Batching, length: int, seed: int, tokens: int) -> tuple[int, ...]:
    return solo(FAMILY[batching]).answer(prompt(length, seed), tokens).tokens[:tokens]


def assert_empty(runner: MlxRunner) -> None:
    assert (runner.stats().rows, runner.stats().kv_bytes, runner.stats().kv_tokens_bytes) == (0, 0, 0)


@pytest.mark.parametrize("batching", Batching)
def test_rows_get_their_solo_answers_and_leave_nothing(batching: Batching) -> None:
    runner = runner_of(batching)
    stepper = Stepper(runner, *(Rider(prompt(length, 1), 6, chunk=8) for length in (1, 2, 9, 40)))
    stepper.run(3)
    stepper.riders += [Rider(prompt(length, 2), 8) for length in (1, 17)]
    stepper.run(2)
    assert runner.stats().rows == 6
    assert 0 < runner.stats().kv_tokens_bytes <= runner.stats().kv_bytes
    stepper.run()
    for rider in stepper.riders:
        seed = 1 if rider in stepper.riders[:4] else 2
        assert tuple(rider.drawn) == alone(batching, len(rider.prompt), seed, rider.tokens)
    assert_empty(runner)


@pytest.mark.parametrize("batching", Batching)
def test_a_step_says_when_it_is_built_before_the_device_has_it(
    batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    launch, runner = mx.async_eval, runner_of(batching)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (told.append("launched"), launch(*arrays)))
    runner.when_built(lambda: told.append("built"))
    stepper = Stepper(runner, Rider(prompt(5, 1), 3))
    stepper.run()
    assert told[:2] == ["built", "launched"] and told.count("built") == 3
    before = len(told)
    runner.step(StepPlan(1000))
    assert len(told) == before  # there was nothing to compute


@pytest.mark.parametrize("batching", [Batching.FLAT, Batching.HYBRID, Batching.DENSE])
def test_a_row_that_moves_to_another_cohort_takes_its_token_along(batching: Batching) -> None:
    """The long row comes first in the batch until it outgrows what it shares with the short ones."""
    runner = runner_of(batching)
    stepper = Stepper(runner, Rider(prompt(251, 1), 12))
    stepper.run(2)
    stepper.riders += [Rider(prompt(5, 1), 10), Rider(prompt(6, 1), 10)]
    stepper.run()
    for rider in stepper.riders:
        assert tuple(rider.drawn) == alone(batching, len(rider.prompt), 1, rider.tokens)


def test_a_result_comes_with_the_next_plan() -> None:
    runner = runner_of(Batching.FLAT)
    first = StepPlan(7, (), (NewRow(1, GREEDY, 0),), (Span(1, 0, prompt(5, 1), True),))
    assert runner.step(StepPlan(6)) is None
    assert runner.step(first) is None
    landed = runner.step(StepPlan(8, decode=(1,)))
    assert landed is not None and landed.number == 7
    want = alone(Batching.FLAT, 5, 1, 2)
    assert landed.samples[1].token == want[0]
    landed = runner.step(StepPlan(9, release=(1,)))
    assert landed is not None and (landed.number, landed.samples[1].token) == (8, want[1])
    assert runner.step(StepPlan(10)) is None
    assert_empty(runner)


@pytest.mark.parametrize("batching", Batching)
def test_only_last_spans_and_decoding_rows_draw(batching: Batching) -> None:
    runner = runner_of(batching)
    tokens = prompt(40, 1)
    admit = (NewRow(1, GREEDY, 0), NewRow(2, GREEDY, 0))
    runner.step(StepPlan(1, (), admit, (Span(1, 0, tokens[:20], False), Span(2, 0, tokens[:9], False))))
    landed = runner.step(
        StepPlan(2, (), (), (Span(1, 20, tokens[20:], True), Span(2, 9, tokens[9:10], False)))
    )
    assert landed is not None and landed.samples == {} == landed.failed == landed.lost
    landed = runner.step(StepPlan(3, (), (), (Span(2, 10, tokens[10:], True),), (1,)))
    assert landed is not None and list(landed.samples) == [1]
    landed = runner.step(StepPlan(4))
    assert landed is not None and sorted(landed.samples) == [1, 2]
    assert landed.samples[2].token == alone(batching, 40, 1, 1)[0]


@pytest.mark.parametrize("batching", SHARED)
def test_a_row_that_decodes_no_more_leaves_the_batch(batching: Batching) -> None:
    runner = runner_of(batching)
    stepper = Stepper(runner, Rider(prompt(5, 1), 30), Rider(prompt(9, 1), 8))
    stepper.run(3)
    first, second = stepper.riders
    stepper.riders.remove(first)
    stepper.run(1)
    assert runner.stats().rows == 1
    stepper.run()
    assert tuple(second.drawn) == alone(batching, 9, 1, 8)
    assert_empty(runner)


@pytest.mark.parametrize("batching", Batching)
def test_unknown_rows(batching: Batching) -> None:
    """Released: ignored. Asked for tokens: lost. The others know nothing of it."""
    runner = runner_of(batching)
    rider = Rider(prompt(5, 1), 9)
    stepper = Stepper(runner, rider)
    stepper.run(2)
    landed = runner.step(StepPlan(50, (98, 99), (), (Span(97, 0, (1, 2), True),), (1, 96)))
    assert landed is not None and not landed.lost
    stepper.take(landed)
    rider.launched += 1
    landed = stepper.step()
    assert landed is not None and landed.number == 50
    assert landed.lost.keys() == {96, 97} and landed.samples.keys() == {1}
    stepper.run()
    assert tuple(rider.drawn) == alone(batching, 5, 1, 9)
    assert_empty(runner)


@pytest.mark.parametrize("batching", Batching)
def test_a_step_whose_rows_are_all_gone_frees_the_rest(batching: Batching) -> None:
    runner = runner_of(batching)
    Stepper(runner, Rider(prompt(5, 1), 9), Rider(prompt(6, 1), 9)).run(3)
    runner.step(StepPlan(50, (1, 2), decode=(96,)))
    assert_empty(runner)
    landed = runner.step(StepPlan(51))
    assert landed is not None and landed.lost.keys() == {96}


@pytest.mark.parametrize("batching", Batching)
def test_a_name_may_be_used_again_at_once(batching: Batching) -> None:
    """Released and admitted in one plan: the new row has nothing of the old one."""
    runner = runner_of(batching)
    other = Rider(prompt(6, 1), 12)
    stepper = Stepper(runner, Rider(prompt(5, 1), 12), other)
    stepper.run(3)
    stepper.riders.remove(stepper.riders[0])
    span = Span(1, 0, prompt(9, 3), True)
    runner.step(StepPlan(50, (1,), (NewRow(1, GREEDY, 0),), (span,), (2,)))
    landed = runner.step(StepPlan(51, (), (), (), (1, 2)))
    assert landed is not None and landed.lost == {} == landed.failed
    tokens = [landed.samples[1].token]
    landed = runner.step(StepPlan(52))
    assert landed is not None
    assert (*tokens, landed.samples[1].token) == alone(batching, 9, 3, 2)
    assert landed.samples[2].token == alone(batching, 6, 1, 5)[4]


SEEDED = SamplingParams(temperature=1.3, top_p=0.95, top_k=60)


@pytest.mark.parametrize("batching", Batching)
def test_a_seeded_row_draws_the_same_tokens_anywhere(batching: Batching) -> None:
    def riders() -> list[Rider]:
        kinds = [SEEDED, SamplingParams(temperature=0.8), SamplingParams(min_p=0.05), GREEDY]
        return [Rider(prompt(length, 5), 7, kinds[at % 4], at) for at, length in enumerate((3, 1, 12, 30, 8))]

    want = [answers(runner_of(batching), [rider])[0] for rider in riders()]
    assert len({tuple(tokens) for tokens in want}) == 5
    assert answers(runner_of(batching), riders()) == want
    assert answers(runner_of(batching), riders()[::-1]) == want[::-1]

    stepper = Stepper(runner_of(batching), *riders()[:3])
    stepper.run(3)
    stepper.preempt(stepper.riders[0])
    stepper.riders += riders()[3:]
    stepper.run(2)
    stepper.preempt(stepper.riders[0])
    stepper.preempt(stepper.riders[2])
    stepper.run()
    assert [rider.drawn for rider in stepper.riders] == want


@pytest.mark.parametrize("batching", Batching)
def test_token_n_of_a_row_is_drawn_with_its_seed_and_n(batching: Batching) -> None:
    """From the logits of the model alone; after preemption too."""
    model = solo(FAMILY[batching]).model
    stepper = Stepper(runner_of(batching), *(Rider(prompt(6, at), 9, SEEDED, 40 + at) for at in range(3)))
    stepper.run(4)
    stepper.preempt(stepper.riders[1])
    stepper.run()
    for rider in stepper.riders:
        tokens = mx.array([[*rider.prompt, *rider.drawn]])
        logits = model(tokens, cache=make_prompt_cache(model))[0, len(rider.prompt) - 1 : -1]
        draws = [Draw(SEEDED, row_key(rider.seed), count) for count in range(9)]
        assert rider.drawn == sample(logits, draws).tokens.tolist()


def test_seeds_and_settings_make_a_difference() -> None:
    riders = [Rider(prompt(5, 1), 12, SEEDED, seed) for seed in (1, 1, 2, 2**64 - 1)]
    riders.append(Rider(prompt(5, 1), 12, SamplingParams(temperature=1.3, top_k=1), 1))
    first, same, second, last, greedy = answers(runner_of(Batching.FLAT), riders)
    assert first == same
    assert len({tuple(tokens) for tokens in (first, second, last, greedy)}) == 4
    assert tuple(greedy) == alone(Batching.FLAT, 5, 1, 12)


@pytest.mark.parametrize("batching", Batching)
def test_log_probabilities_are_the_models(batching: Batching) -> None:
    """Against float64 over the logits of the model alone."""
    model = solo(FAMILY[batching]).model
    wanted = (None, 0, 4, 20)
    riders = [
        Rider(prompt(7 + at, 2), 5, SamplingParams(temperature=1.5, top_k=30, logprobs=count), at)
        for at, count in enumerate(wanted)
    ]
    answers(runner_of(batching), riders)
    for rider, count in zip(riders, wanted, strict=True):
        tokens = mx.array([[*rider.prompt, *rider.drawn]])
        logits = np.array(model(tokens, cache=make_prompt_cache(model)))[0].astype(np.float64)
        exact = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        exact -= logits.max(-1, keepdims=True)
        for at, drawn in enumerate(rider.samples):
            row = exact[len(rider.prompt) - 1 + at]
            if count is None:
                assert drawn.logprob is None and drawn.top == ()
                continue
            assert drawn.logprob == pytest.approx(row[drawn.token], abs=2e-4)
            assert len(drawn.top) == count
            assert [pair[1] for pair in drawn.top] == sorted((pair[1] for pair in drawn.top), reverse=True)
            best = np.sort(row)[::-1][:count]
            assert [pair[1] for pair in drawn.top] == pytest.approx(best.tolist(), abs=2e-4)
            assert all(logprob == pytest.approx(row[token], abs=2e-4) for token, logprob in drawn.top)


def counted(batching: Batching, shapes: list[tuple[int, ...]], **options: Any) -> MlxRunner:
    """A runner whose forwards note the shapes of their tokens."""
    model = solo(FAMILY[batching]).model

    def forward(tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        shapes.append(tokens.shape)
        logits: mx.array = model(tokens, cache=caches, **told)
        return logits

    return MlxRunner(forward, lambda: list(make_prompt_cache(model)), batching, **options)


@pytest.mark.parametrize("batching", [Batching.HYBRID, Batching.DENSE, Batching.SOLO])
def test_prompts_in_one_piece(batching: Batching) -> None:
    """Held back until the last chunk; what the row drew before it was preempted is fed token by token."""
    shapes: list[tuple[int, ...]] = []
    runner = counted(batching, shapes, whole_prompts=True)
    rider = Rider(prompt(30, 1), 8, chunk=11)
    stepper = Stepper(runner, rider)
    stepper.run(2)
    assert shapes == []
    stepper.run(4)
    assert shapes == [(1, 30), (1, 1), (1, 1), (1, 1)]
    assert len(rider.samples) == 3
    stepper.preempt(rider)
    stepper.run(3)
    assert shapes[4:] == [(1, 30), *[(1, 1)] * 3]
    stepper.run()
    assert tuple(rider.drawn) == alone(batching, 30, 1, 8)
    assert_empty(runner)


def test_a_flat_step_is_one_forward() -> None:
    shapes: list[tuple[int, ...]] = []
    stepper = Stepper(counted(Batching.FLAT, shapes), Rider(prompt(30, 1), 4, chunk=20))
    stepper.run(2)
    stepper.riders += [Rider(prompt(9, 1), 2), Rider(prompt(3, 1), 2)]
    stepper.run(1)
    assert shapes == [(20, 1), (10, 1), (13, 1)]


@pytest.mark.parametrize("batching", [Batching.HYBRID, Batching.DENSE])
def test_chunks_come_one_request_at_a_time(batching: Batching) -> None:
    """And the last token of a prompt goes with the rows that decode."""
    shapes: list[tuple[int, ...]] = []
    stepper = Stepper(counted(batching, shapes), Rider(prompt(30, 1), 4, chunk=20))
    stepper.run(2)
    stepper.riders += [Rider(prompt(9, 1), 2), Rider(prompt(1, 1), 2)]
    stepper.run(1)
    assert shapes == [(1, 20), (1, 9), (1, 1), (1, 8), (1, 1), (2, 1)]


def test_logits_are_computed_for_the_tokens_that_draw() -> None:
    model = solo("llama").model
    seen: list[int] = []

    def head(hidden: mx.array) -> mx.array:
        seen.append(hidden.shape[0])
        logits: mx.array = model.lm_head(hidden)
        return logits

    def never(tokens: mx.array, caches: list[Any]) -> mx.array:
        raise AssertionError("the whole model is not called")

    runner = MlxRunner(
        never, lambda: list(make_prompt_cache(model)), Batching.FLAT, split=(model.model, head)
    )
    stepper = Stepper(runner, Rider(prompt(30, 1), 3, chunk=20), Rider(prompt(6, 1), 4))
    stepper.run()
    assert seen == [1, 2, 2, 2]
    assert [tuple(rider.drawn) for rider in stepper.riders] == [
        alone(Batching.FLAT, 30, 1, 3),
        alone(Batching.FLAT, 6, 1, 4),
    ]


@pytest.mark.parametrize("batching", Batching)
def test_a_closed_runner_holds_no_model(batching: Batching) -> None:
    model = build(FAMILIES[FAMILY[batching]])
    runner = make_runner(model, VOCABULARY, batching)[1]
    Stepper(runner, Rider(prompt(5, 1), 9), Rider(prompt(6, 1), 9, chunk=2)).run(2)
    gone = weakref.ref(model)
    del model
    runner.close()
    gc.collect()
    assert gone() is None
    assert_empty(runner)


@pytest.mark.parametrize("batching", Batching)
def test_a_closed_runner_fails_rows_and_does_not_raise(batching: Batching) -> None:
    runner = runner_of(batching)
    runner.close()
    rider = Rider(prompt(5, 1), 9)
    Stepper(runner, rider).run()
    assert rider.failed == "The model step failed (RuntimeError)."
