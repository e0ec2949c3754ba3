"""One family's rows in a moving batch, held against solo runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from chairlift.engine.batching import Batching
from chairlift.engine.models.batching import Finding
from chairlift.engine.models.build import make_runner
from chairlift.engine.plan import RunnerStats
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import COARSE, FAMILIES, MENDED, build
from tests.mlx.lift import LOGPROB_ERROR, Difference, Lift, Ride, differences
from tests.mlx.solo import TIE, Solo


@dataclass(frozen=True, slots=True)
class Parity:
    """What came of a schedule.

    Attributes:
        tokens: tokens compared.
        failures: by ride, what the runner said of rows that it failed or lost.
        missing: rides that were not cancelled and did not get all their tokens.
        differences: from the solo answers.
        after: the runner's memory when all rows have left.
    """

    tokens: int
    failures: dict[int, str]
    missing: tuple[int, ...]
    differences: tuple[Difference, ...]
    after: RunnerStats

    @property
    def exact(self) -> bool:
        clean = (self.after.rows, self.after.kv_bytes) == (0, 0)
        return clean and not (self.failures or self.missing or self.differences)


@cache
def solo(name: str) -> Solo:
    """The family's small model and its solo runs."""
    return Solo(build(FAMILIES[name]), mended=name in MENDED)


@cache
def finding(name: str) -> Finding:
    """How the engine batches the family by its own trial."""
    return make_runner(solo(name).model, VOCABULARY)[0]


def measure(name: str, rides: Sequence[Ride], batching: Batching | None = None) -> Parity:
    """All rides on a fresh runner over the family's small model; batched as the engine found by default."""
    found = finding(name)
    known = None if found.whole_prompts else found.batching
    _, runner = make_runner(solo(name).model, VOCABULARY, batching or known)
    lift = Lift(runner)
    answers = lift.run(rides)
    coarse = COARSE.get(name)
    missing = [
        index
        for index, (ride, samples) in enumerate(zip(rides, answers, strict=True))
        if ride.cancel is None and len(samples) != ride.tokens
    ]
    found_differences = differences(
        solo(name),
        rides,
        answers,
        error=LOGPROB_ERROR if coarse is None else coarse,
        tie=TIE if coarse is None else coarse,
    )
    return Parity(
        tokens=sum(map(len, answers)),
        failures=lift.failures,
        missing=tuple(missing),
        differences=tuple(found_differences),
        after=runner.stats(),
    )
