"""Rides of many rows through a `Runner`: who joins when, in which chunks, and who is stopped in between.

A miniature scheduler that plans from fixed schedules instead of requests, with the runner's own look-ahead: a
plan is made when the host knows the tokens of all plans but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle

from chairlift.engine.constraints import Constraint
from chairlift.engine.media import PreparedMedia
from chairlift.engine.plan import NewRow, Runner, Sample, Span, StepPlan, StepResult
from chairlift.engine.request import SamplingParams
from tests.mlx.solo import TIE, Prompt, Solo

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
LOGPROB_ERROR = 1e-4
"""Most that a drawn token's log probability may differ from the solo run's, in float32."""


@dataclass(frozen=True, slots=True)
class Ride:
    """One row's schedule. Steps count from 0.

    Attributes:
        prompt: its tokens.
        join: the first step in which it prefills.
        tokens: how many to draw; then it leaves.
        chunks: sizes of its prompt's chunks, over and over until the prompt is through.
        cancel: the step in which it is released for good, wherever it is by then.
        preempt: steps in which its state is dropped; it starts again in the step after, from its tokens.
        media: images of its prompt.
        sampling, seed: how it draws.
        constraint: what it must follow.
    """

    prompt: Prompt
    join: int = 0
    tokens: int = 12
    chunks: tuple[int, ...] = (512,)
    cancel: int | None = None
    preempt: tuple[int, ...] = ()
    media: PreparedMedia | None = None
    sampling: SamplingParams = GREEDY
    seed: int = 0
    constraint: Constraint | None = None


@dataclass(slots=True)
class _Row:
    """A ride under way."""

    ride: Ride
    row: int
    known: list[int]
    """Tokens that its state is to be made of: the prompt and what was drawn before it last started."""
    planned: int = 0
    """Tokens drawn or in flight."""
    filled: int = 0
    """Known tokens in plans so far."""
    running: bool = False
    over: bool = False
    unseen: int = 0
    """Images that it takes steps to encode."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return self.running and self.filled == len(self.known)


class Lift:
    """Drives a runner through rides and keeps what each row drew."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._number = count(1)
        self._ids = count(1)
        self.failures: dict[int, str] = {}
        """By index of the ride: what the runner said of rows it failed or lost."""

    def run(self, rides: Sequence[Ride]) -> list[list[Sample]]:
        """Ride by ride, every sample that the row got before it left.

        Afterwards the runner holds no row.
        """
        rows = [_Row(ride, next(self._ids), list(ride.prompt)) for ride in rides]
        chunks = {row.row: cycle(row.ride.chunks) for row in rows}
        step = 0
        while not all(row.over for row in rows):
            release = self._release(rows, step)
            admit = self._admit(rows, step)
            prefill, decode, encode = [], [], []
            for row in rows:
                if not row.running or row.planned >= row.ride.tokens:
                    continue
                if row.decodes:
                    decode.append(row.row)
                    row.planned += 1
                elif row.unseen:
                    encode.append(row.row)
                    row.unseen -= 1
                else:
                    prefill.append(self._span(row, next(chunks[row.row])))
            plan = StepPlan(next(self._number), release, admit, tuple(prefill), tuple(decode), tuple(encode))
            self._take(rows, self._runner.step(plan))
            step += 1
        leftover = tuple(row.row for row in rows)
        self._take(rows, self._runner.step(StepPlan(next(self._number), release=leftover)))
        return [row.samples for row in rows]

    def _release(self, rows: Sequence[_Row], step: int) -> tuple[int, ...]:
        """Rows that leave in this step: cancelled, preempted, or with all tokens planned."""
        gone = []
        for row in rows:
            cancelled = row.ride.cancel is not None and step >= row.ride.cancel and not row.over
            finished = row.running and row.planned >= row.ride.tokens
            preempted = row.running and step in row.ride.preempt and not finished
            if not (cancelled or finished or preempted):
                continue
            if row.running:
                gone.append(row.row)
            row.running = False
            row.over = cancelled or finished
        return tuple(gone)

    def _admit(self, rows: Sequence[_Row], step: int) -> tuple[NewRow, ...]:
        """Rows that join or come back. A preempted row waits out the step that still holds its last draw."""
        admitted = []
        for row in rows:
            if row.running or row.over or step < row.ride.join or step in row.ride.preempt:
                continue
            row.running = True
            drawn = [sample.token for sample in row.samples]
            row.known, row.filled, row.planned = [*row.ride.prompt, *drawn], 0, len(drawn)
            media = row.ride.media
            row.unseen = len(media.digests) if media is not None else 0
            prompt = row.ride.prompt if media is not None else ()
            known = tuple(row.known)
            new = NewRow(row.row, row.ride.sampling, row.ride.seed, len(drawn), media, prompt, known)
            admitted.append(replace(new, constraint=row.ride.constraint))
        return tuple(admitted)

    def _span(self, row: _Row, size: int) -> Span:
        start, end = row.filled, min(row.filled + size, len(row.known))
        row.filled = end
        last = end == len(row.known)
        row.planned += last
        return Span(row.row, start, tuple(row.known[start:end]), last)

    def _take(self, rows: Sequence[_Row], result: StepResult | None) -> None:
        if result is None:
            return
        for index, row in enumerate(rows):
            message = result.failed.get(row.row) or result.lost.get(row.row)
            if message is not None:
                self.failures.setdefault(index, message)
                row.running, row.over = False, True
            elif row.row in result.encoded:
                row.unseen = 0
            elif row.row in result.samples and not (row.over and row.ride.cancel is not None):
                row.samples.append(result.samples[row.row])


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a row's answer left its solo answer."""

    ride: int
    at: int
    got: Sample
    want: int
    want_logprob: float
    gap: float


def differences(
    solo: Solo,
    rides: Sequence[Ride],
    answers: Sequence[Sequence[Sample]],
    *,
    error: float = LOGPROB_ERROR,
    tie: float = TIE,
) -> list[Difference]:
    """Every row's first token or log probability that is not the solo run's. A tie ends a row's list.

    Args:
        error: most that the log probability of a drawn token may differ.
        tie: two candidates closer than this may be drawn either way.
    """
    found = []
    for index, (ride, samples) in enumerate(zip(rides, answers, strict=True)):
        want = solo.answer(ride.prompt, ride.tokens)
        for at, sample in enumerate(samples):
            token, logprob, gap = want.tokens[at], want.logprobs[at], want.gaps[at]
            near = sample.logprob is not None and abs(sample.logprob - logprob) <= error
            if sample.token == token and near:
                continue
            if not (near and gap < tie):
                found.append(Difference(index, at, sample, token, logprob, gap))
            break
    return found
