"""Bounded thinking over small random models: ended at the bound, alone and in any company."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.constraints import Regex, Sequence, Until
from chairlift.engine.request import SamplingParams
from chairlift.engine.runner import MlxRunner
from chairlift.engine.thinking import ThinkingBudget
from tests.engine.stepping import GREEDY, Rider, Stepper, answers
from tests.engine.test_runner_constraints import constraint, runner_of
from tests.mlx.solo import prompt
from tests.vocabularies import TOY

END = TOY.index(b"</")
START = TOY.index(b"think")
TOKENS = 12
WARM = SamplingParams(temperature=1.5, top_p=0.99)
BUDGET = ThinkingBudget(5, END)


def company() -> list[Rider]:
    """Greedy and sampled rows, bounded, constrained, both and neither."""
    behind = constraint(Sequence((Until("</"), Regex("[a-f]{4}"))))
    opens = replace(WARM, logit_bias={START: 90})
    return [
        Rider(prompt(5, 1), TOKENS, GREEDY, thinking=BUDGET),
        Rider(prompt(9, 1), TOKENS, WARM, 1),
        Rider(prompt(30, 1), TOKENS, WARM, 2, chunk=7, thinking=ThinkingBudget(3, END)),
        Rider(prompt(6, 1), TOKENS, WARM, 3, constraint=behind, thinking=ThinkingBudget(4, END)),
        Rider(prompt(2, 1), TOKENS, WARM, 4, thinking=ThinkingBudget(0, END, START)),
        Rider(prompt(3, 1), TOKENS, opens, 5, thinking=ThinkingBudget(2, END, START)),
    ]


@cache
def alone(batching: Batching) -> list[list[int]]:
    return [answers(runner_of(batching), [rider])[0] for rider in company()]


def test_a_row_goes_on_as_if_it_had_ended_its_thinking_itself() -> None:
    runner = runner_of(Batching.FLAT)
    start = prompt(5, 1)
    [free] = answers(runner, [Rider(start, TOKENS, GREEDY)])
    assert END not in free[:6]
    [bounded] = answers(runner, [Rider(start, TOKENS, GREEDY, thinking=BUDGET)])
    assert bounded[:6] == [*free[:5], END]
    [rest] = answers(runner, [Rider((*start, *bounded[:6]), TOKENS - 6, GREEDY)])
    assert bounded[6:] == rest


@pytest.mark.parametrize("batching", [Batching.FLAT, Batching.HYBRID, Batching.SOLO])
def test_bounded_rows_answer_as_they_do_alone(batching: Batching) -> None:
    riders = company()
    stepper = Stepper(runner_of(batching), *riders[:3])
    stepper.run(4)
    stepper.riders += riders[3:]
    stepper.run()
    assert [rider.drawn for rider in riders] == alone(batching)
    for at, most in ((0, 5), (2, 3), (3, 4)):
        assert END in riders[at].drawn[: most + 1]
    opened = riders[5].drawn
    assert opened[0] == START and END in opened[1:4]
    unbounded = Rider(prompt(2, 1), TOKENS, WARM, 4)
    assert answers(runner_of(batching), [unbounded]) == [riders[4].drawn]  # it did not think


def test_after_preemption_the_count_goes_on() -> None:
    riders = company()
    stepper = Stepper(runner_of(Batching.FLAT), *riders)
    for steps, rider in ((4, riders[0]), (1, riders[2]), (1, riders[3]), (2, riders[0]), (1, riders[5])):
        stepper.run(steps)
        stepper.preempt(rider)
    stepper.run()
    assert [rider.drawn for rider in riders] == alone(Batching.FLAT)


def test_others_wait_only_while_a_bound_may_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []
    finish = MlxRunner._draw_late

    def watched(self: MlxRunner, flight: object) -> None:
        late.append(len(rider.samples))
        finish(self, flight)  # type: ignore[arg-type]

    monkeypatch.setattr(MlxRunner, "_draw_late", watched)
    rider = Rider(prompt(5, 1), TOKENS, GREEDY, thinking=BUDGET)
    Stepper(runner_of(Batching.FLAT), rider).run()
    assert late and min(late) >= 4 and max(late) <= 6
