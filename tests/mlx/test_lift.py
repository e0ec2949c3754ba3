"""The parity tests' own tools: the driver follows the look-ahead, and the comparison sees what it should."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chairlift.engine.plan import RunnerStats, Sample, StepPlan, StepResult
from tests.mlx.lift import Lift, Ride, differences
from tests.mlx.solo import Answer, Solo

PROMPT = tuple(range(10))


class Recorder:
    """A runner that draws a row's number of known tokens, and keeps the plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.held: dict[int, int] = {}
        self._last: StepResult | None = None

    def step(self, plan: StepPlan) -> StepResult | None:
        self.plans.append(plan)
        for row in plan.release:
            self.held.pop(row, None)
        self.held.update({new.row: 0 for new in plan.admit})
        for span in plan.prefill:
            assert span.start == self.held[span.row]
            self.held[span.row] += len(span.tokens)
        for row in plan.decode:
            self.held[row] += 1
        drawing = [span.row for span in plan.prefill if span.last] + list(plan.decode)
        landed, self._last = self._last, None
        if not plan.idle:
            self._last = StepResult(plan.number, {row: Sample(self.held[row]) for row in drawing})
        return landed

    def stats(self) -> RunnerStats:
        return RunnerStats(rows=len(self.held))

    def close(self) -> None:
        self.held.clear()


def tokens(answers: list[list[Sample]]) -> list[list[int]]:
    return [[sample.token for sample in samples] for samples in answers]


def test_a_ride_prefills_in_its_chunks_and_draws_its_tokens() -> None:
    runner = Recorder()
    answers = Lift(runner).run([Ride(PROMPT, tokens=3, chunks=(4,))])
    assert tokens(answers) == [[10, 11, 12]]
    spans = [(span.start, len(span.tokens), span.last) for plan in runner.plans for span in plan.prefill]
    assert spans == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert runner.held == {}


def test_a_preempted_ride_starts_again_from_all_it_drew() -> None:
    runner = Recorder()
    answers = Lift(runner).run([Ride(PROMPT, tokens=6, preempt=(3,))])
    assert tokens(answers) == [[10, 11, 12, 13, 14, 15]]
    again = next(plan for plan in runner.plans[1:] if plan.admit)
    assert again.admit[0].drawn == 3
    assert again.prefill[0].tokens == (*PROMPT, 10, 11, 12)


def test_a_cancelled_ride_keeps_what_it_had() -> None:
    answers = Lift(Recorder()).run([Ride(PROMPT, tokens=6, cancel=3), Ride(PROMPT, join=1, tokens=6)])
    assert tokens(answers) == [[10, 11], [10, 11, 12, 13, 14, 15]]


def test_a_joiner_waits_for_its_step() -> None:
    runner = Recorder()
    Lift(runner).run([Ride(PROMPT, tokens=4), Ride(PROMPT, join=2, tokens=1)])
    assert [len(plan.admit) for plan in runner.plans[:4]] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("gap", "token", "logprob", "found"),
    [
        (0.5, 7, -1.0, 0),
        (0.5, 8, -1.0, 1),
        (0.5, 7, -1.001, 1),
        (1e-6, 8, -1.0, 0),
        (1e-6, 8, -1.001, 1),
        (1e-4, 8, -1.0, 1),
    ],
)
def test_a_difference_is_a_wrong_token_or_probability_and_no_tie(
    gap: float, token: int, logprob: float, found: int
) -> None:
    solo = Solo(SimpleNamespace(), _answers={PROMPT: Answer((7,), (-1.0,), (gap,))})
    answers = [[Sample(token, logprob)]]
    assert len(differences(solo, [Ride(PROMPT, tokens=1)], answers)) == found
