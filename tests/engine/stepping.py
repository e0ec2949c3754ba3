"""Rows driven through a runner step by step as the scheduler does it, for tests of faults and of sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from chairlift.engine.constraints import Constraint
from chairlift.engine.plan import NewRow, Runner, Sample, Span, StepPlan, StepResult
from chairlift.engine.request import SamplingParams
from chairlift.engine.thinking import ThinkingBudget

GREEDY = SamplingParams(temperature=0)


@dataclass(eq=False)
class Rider:
    """One request, and what it got."""

    prompt: tuple[int, ...]
    tokens: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    chunk: int = 512
    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None
    samples: list[Sample] = field(default_factory=list)
    failed: str | None = None
    losses: list[str] = field(default_factory=list)
    row: int | None = None
    """Its state on the runner; None before, after, and while it waits to start again."""
    known: tuple[int, ...] = ()
    filled: int = 0
    launched: int = 0

    @property
    def drawn(self) -> list[int]:
        return [sample.token for sample in self.samples]

    @property
    def over(self) -> bool:
        return self.failed is not None or len(self.samples) == self.tokens


class Stepper:
    """Plans one step of all riders at a time and reads results one step late. A rider whose state is lost
    starts again from its tokens."""

    def __init__(self, runner: Runner, *riders: Rider) -> None:
        self.runner = runner
        self.riders = list(riders)
        self._riding: dict[int, Rider] = {}
        """By row: whose samples count."""
        self._release: list[int] = []
        self._rows = count(1)
        self._numbers = count(1)

    def preempt(self, rider: Rider) -> None:
        """Drop the rider's state and what it has in flight; the next step starts it again."""
        assert rider.row is not None
        self._release.append(rider.row)
        del self._riding[rider.row]
        rider.row = None

    def step(self) -> StepResult | None:
        admit: list[NewRow] = []
        prefill: list[Span] = []
        decode: list[int] = []
        for rider in self.riders:
            if rider.row is None and not rider.over and rider not in self._riding.values():
                admit.append(self._admit(rider))
            if rider.row is None:
                continue
            if rider.launched == rider.tokens:
                self._release.append(rider.row)
                rider.row = None
            elif rider.filled == len(rider.known):
                decode.append(rider.row)
                rider.launched += 1
            else:
                prefill.append(self._span(rider, rider.row))
        release, self._release = tuple(self._release), []
        plan = StepPlan(next(self._numbers), release, tuple(admit), tuple(prefill), tuple(decode))
        result = self.runner.step(plan)
        if result is not None:
            self.take(result)
        return result

    def run(self, steps: int | None = None) -> None:
        """So many steps, or until everyone is through and the runner has nothing more to say."""
        for _ in range(steps or 400):
            result = self.step()
            if steps is None and result is None and all(rider.over for rider in self.riders):
                return
        assert steps is not None, "riders are not through"

    def _admit(self, rider: Rider) -> NewRow:
        rider.row = next(self._rows)
        self._riding[rider.row] = rider
        rider.known, rider.filled = (*rider.prompt, *rider.drawn), 0
        rider.launched = len(rider.samples)
        return NewRow(
            rider.row,
            rider.sampling,
            rider.seed,
            rider.launched,
            known=rider.known,
            constraint=rider.constraint,
            thinking=rider.thinking,
        )

    def _span(self, rider: Rider, row: int) -> Span:
        start, end = rider.filled, min(rider.filled + rider.chunk, len(rider.known))
        rider.filled = end
        rider.launched += end == len(rider.known)
        return Span(row, start, rider.known[start:end], end == len(rider.known))

    def take(self, result: StepResult) -> None:
        assert not result.failed.keys() & result.samples.keys()
        assert not result.lost.keys() & result.samples.keys()
        for row, rider in list(self._riding.items()):
            if row in result.failed or row in result.lost:
                del self._riding[row]
                rider.row = None
                rider.failed = result.failed.get(row)
                rider.losses += [result.lost[row]] if row in result.lost else []
            elif row in result.samples:
                rider.samples.append(result.samples[row])
                if rider.over:
                    del self._riding[row]


def answers(runner: Runner, riders: Iterable[Rider]) -> list[list[int]]:
    """The tokens of riders that start together and are not disturbed."""
    stepper = Stepper(runner, *riders)
    stepper.run()
    assert all(rider.failed is None and not rider.losses for rider in stepper.riders)
    return [rider.drawn for rider in stepper.riders]
