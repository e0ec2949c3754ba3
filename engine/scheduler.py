"""Decides, step by step, what the runner computes. Pure: no arrays, no event loop, no clock of its own.

The plan of step n + 1 is made before the tokens of step n are known (one step of look-ahead), so the
scheduler counts draws as launched when it plans them, and drops what arrives for rows that have gone.

Token budget of a step: every row in decode counts one token and is always in; prefill gets the rest of
`max_num_batched_tokens`, but never less than one minimal chunk, so neither side can starve the other. A
step is never larger than `max(max_num_batched_tokens, rows in decode + one minimal chunk)`, and while rows
decode it takes no more prompt tokens than its `pace` allows.

Who prefills, and how much, is said by `chairlift.engine.sharing`.

With a prefix index (chairlift.engine.prefix) a row begins behind the longest prefix of its prompt that is
kept, and one whose prefix another row is computing just now waits for it rather than computing it again.
Where the disk has more of it than memory, the row waits in the queue while that is fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chairlift.engine.errors import ContextLengthExceeded, QueueFull
from chairlift.engine.plan import NewRow, Sample, Span, StepPlan, StepResult
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import Save
from chairlift.engine.request import Request
from chairlift.engine.row import RequestTiming, Row, RowState
from chairlift.engine.sharing import Sharing

MAX_OVERTAKEN = 8
"""A row that so many younger ones have passed in the queue goes next, whatever its priority."""
MAX_LOSSES = 2
"""A row is started again so many times without having drawn a token in between; then it fails."""
RETRY_AFTER = (1.0, 60.0)
"""Seconds: bounds of `QueueFull.retry_after`."""


@dataclass(slots=True)
class Committed:
    """What a step's result means to the rows that are still there, in the order of the plan."""

    drawn: list[tuple[Row, Sample]] = field(default_factory=list)
    failed: list[tuple[Row, str]] = field(default_factory=list)
    """Rows that have ended, with one line for the client."""


class Scheduler:
    """Owns every row. Not thread-safe: one thread calls it (in the engine, the event loop's).

    Args:
        max_num_seqs: rows that hold model state at once.
        max_num_batched_tokens: token budget of a step.
        max_waiting: rows in the wait queue beyond the free seats.
        context_length: most tokens of prompt and answer together.
        clock: monotonic seconds, for timing and `retry_after`.
        prefixes: what is kept of earlier rows; None keeps nothing.
        pace: prompt tokens of a step in which rows decode; None: what the budget leaves.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        context_length: int,
        clock: Callable[[], float],
        prefixes: Prefixes | None = None,
        pace: Callable[[], int] | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_waiting = max_waiting
        self.context_length = context_length
        self._sharing = Sharing.of(max_num_batched_tokens)
        self.preemptions = 0
        self.losses = 0
        self.wasted = 0
        """Draws that arrived for rows which had ended."""
        self.prefixes = prefixes if prefixes is not None else Prefixes(None, clock)
        self._pace = pace
        self._clock = clock
        self._waiting: dict[int, Row] = {}  # by arrival
        self._live: dict[int, Row] = {}  # by id: rows that hold model state, oldest admission first
        self._release: list[int] = []
        self._tidy = False
        self._in_flight: deque[StepPlan] = deque()  # launched, result not seen; at most two
        self._finish_times: deque[float] = deque(maxlen=64)
        self._step = 0
        self._next_id = 1
        self._next_arrival = 0

    @property
    def running(self) -> int:
        """Rows that hold model state."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> list[Row]:
        """Every row that has not ended."""
        return [*self._live.values(), *self._waiting.values()]

    @property
    def plans(self) -> int:
        """Number of the last plan."""
        return self._step

    @property
    def busy(self) -> bool:
        """There is something to compute, to release, to drop or to fetch."""
        return bool(self._waiting) or self._has_work

    @property
    def _has_work(self) -> bool:
        """There is something to plan, whatever the queue waits for."""
        dropped = self.prefixes.has_dropped
        return bool(self._live or self._release or self._in_flight or dropped or self._tidy)

    @property
    def pause(self) -> float | None:
        """Seconds until there may be something to plan, unless something happens before that; 0 for now,
        None for never. Rows may all be waiting for the disk."""
        return 0.0 if self._has_work else self.prefixes.pause(self._waiting.values())

    def add(self, request: Request, seed: int) -> Row:
        """Queue a request.

        `max_tokens` that cannot fit behind the prompt is clamped to the room there is: the answer ends with
        `length` at the end of the context either way.

        Raises:
            ContextLengthExceeded: the prompt fills the context.
            QueueFull: the wait queue is at its bound.
        """
        room = self.room(request)
        if self.waiting >= self.max_waiting + max(0, self.max_num_seqs - self.running):
            raise QueueFull(f"The server is busy: {self.waiting} requests are waiting.", self._retry_after())
        limit = room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)
        row = Row(request, seed, limit, self._next_arrival, RequestTiming(queued=self._clock()))
        self._next_arrival += 1
        row.prefix = self.prefixes.of(request)
        self._waiting[row.arrival] = row
        return row

    def room(self, request: Request) -> int:
        """Tokens of the context that the prompt leaves to the answer.

        Raises:
            ContextLengthExceeded: none.
        """
        prompt = len(request.prompt_token_ids)
        if prompt >= self.context_length:
            raise ContextLengthExceeded(
                "prompt",
                f"The prompt has {prompt} tokens, which leaves no room for an answer: this model's context "
                f"length is {self.context_length} tokens, prompt and answer together.",
            )
        return self.context_length - prompt

    def finish(self, row: Row) -> None:
        """The row has ended, for whatever reason; its state goes with the next plan. Idempotent."""
        if row.finished:
            return
        try:
            self.prefixes.keep(row)
        finally:
            self._detach(row, release=True)
            row.finished = True
            row.timing.finished = self._clock()
            self._finish_times.append(row.timing.finished)

    def preempt(self, row: Row) -> None:
        """Take the row's state away with the next plan and queue it again, at its old place.

        Its tokens are kept; its prompt and output are prefilled anew on re-admission, and the draws go on
        where they were (`NewRow.drawn`). A draw in flight is dropped and drawn again, the same. Does nothing
        for a row without state.
        """
        if row.id is None:
            return
        self.preemptions += 1
        self.prefixes.keep(row)
        self._requeue(row, release=True)

    def schedule(self) -> StepPlan:
        """The next step. The caller launches it: what it holds counts as launched from now on."""
        for row in self._live.values():
            if row.state is RowState.RUNNING and not row.decodable:
                self.prefixes.keep(row)  # its last draw is launched: the step to come drops its state
        decode = [row for row in self._live.values() if row.decodable]
        seats = self.max_num_seqs - len(self._live)
        loads = self.prefixes.load(running=bool(self._live))
        candidates = [row for row in self._live.values() if row.state is RowState.PREFILLING]
        candidates += self._next_in_line(seats)
        budget = self.max_num_batched_tokens - len(decode)
        if decode and self._pace is not None:
            budget = min(budget, self._pace())
        budget = max(budget, self._sharing.least)
        admit: list[NewRow] = []
        prefill: list[Span] = []
        save: list[Save] = []
        encode = self._looking(candidates)
        if encode is not None:
            if encode.id is None:
                admit.append(self._admit(encode))
            encode.looked += 1
            candidates = [row for row in candidates if row is not encode and not row.unseen]
        grants = self._sharing.share(candidates, budget)
        admit += [self._admit(row) for row, _ in grants if row.id is None]
        # What the spans leave can be restored from the next plan on, and what goes for it goes with the next.
        drop, keep = self.prefixes.changed()
        for row, tokens in grants:
            span = self._launch_span(row, tokens)
            prefill.append(span)
            if row.prefix is not None and (kept := row.prefix.after_span(span.row, row.prefilled)):
                save.append(kept)
        for row in decode:
            row.launched += 1
        self._step += 1
        plan = StepPlan(
            number=self._step,
            drop=drop,
            keep=keep,
            release=tuple(self._release),
            admit=tuple(admit),
            prefill=tuple(prefill),
            decode=tuple(row.id for row in decode if row.id is not None),
            encode=(encode.id,) if encode is not None and encode.id is not None else (),
            save=tuple(save),
            load=tuple(load for load in loads if load.page.id not in drop),
            tidy=self._tidy,
        )
        self._release.clear()
        self._tidy = False
        if not plan.idle:
            self._in_flight.append(plan)
        return plan

    def commit(self, result: StepResult | None) -> Committed:
        """Take in what `Runner.step` returned.

        None means that nothing was in flight before the plan just launched. A row of which a step
        has nothing to say, though it should have drawn, is handled as lost.
        """
        committed = Committed()
        if result is not None:
            self.prefixes.spoil(result.spoiled)
        number = self._step - 1 if result is None else result.number
        while self._in_flight and self._in_flight[0].number <= number:
            plan = self._in_flight.popleft()
            told = result is not None and result.number == plan.number
            self._settle(plan, result if result and told else StepResult(plan.number), committed)
        return committed

    def clear_prefixes(self) -> None:
        """Keep nothing of what rows have left so far. The next plan drops it, and gives the memory back."""
        self.prefixes.clear()
        self._tidy = True

    def abandon(self) -> list[Row]:
        """The runner broke off: end every row that was in flight and return them. Their state is released."""
        ids = {id for plan in self._in_flight for id in plan.rows}
        self._in_flight.clear()
        rows = [row for id, row in self._live.items() if id in ids]
        for row in rows:
            self._detach(row, release=True)
            self.finish(row)
        self.prefixes.forget()
        return rows

    # -- results

    def _settle(self, plan: StepPlan, result: StepResult, committed: Committed) -> None:
        drawing = {*plan.decode, *(span.row for span in plan.prefill if span.last)}
        for id in dict.fromkeys((*plan.rows, *result.failed, *result.lost)):
            row = self._live.get(id)
            if row is not None and id in result.encoded:
                row.looked += row.unseen
            if row is None:
                self.wasted += id in drawing and id in result.samples
            elif id in result.failed:
                self._end_failed(row, result.failed[id], committed)
            elif id in result.lost:
                self._lose(row, result.lost[id], committed, release=False)
            elif id in drawing and id not in result.samples:
                self._lose(row, "The step gave no token for this request.", committed, release=True)
            elif id in drawing:
                sample = result.samples[id]
                row.output.append(sample.token)
                row.losses = 0
                committed.drawn.append((row, sample))

    def _end_failed(self, row: Row, message: str, committed: Committed) -> None:
        if row.prefix is not None:
            row.prefix.distrust()
        self._detach(row, release=False)
        self.finish(row)
        committed.failed.append((row, message))

    def _lose(self, row: Row, message: str, committed: Committed, *, release: bool) -> None:
        self.losses += 1
        row.losses += 1
        if row.prefix is not None:
            row.prefix.distrust()
        if row.losses > MAX_LOSSES:
            self._detach(row, release=release)
            self.finish(row)
            committed.failed.append((row, message))
        else:
            self._requeue(row, release=release)

    def _requeue(self, row: Row, *, release: bool) -> None:
        self._detach(row, release=release)
        row.overtaken = 0
        self._waiting[row.arrival] = row

    def _detach(self, row: Row, *, release: bool) -> None:
        """Take its seat or its place in the queue away; `release` unless its state is gone already."""
        self._waiting.pop(row.arrival, None)
        self.prefixes.leave(row)
        if row.id is not None:
            del self._live[row.id]
            if release:
                self._release.append(row.id)
        row.id = None
        row.kept = False
        row.known = ()
        row.prefilled = row.looked = 0
        row.launched = row.drawn

    # -- plans

    def _next_in_line(self, seats: int) -> list[Row]:
        """The waiting rows that may take the free seats, best first."""
        if seats <= 0 or not self._waiting:
            return []

        def order(row: Row) -> tuple[bool, int, int]:
            overdue = row.overtaken >= MAX_OVERTAKEN
            return not overdue, 0 if overdue else row.request.priority, row.arrival

        computing = [row for row in self._live.values() if row.state is RowState.PREFILLING]
        line: list[Row] = []
        for row in sorted(self._waiting.values(), key=order):
            if not self.prefixes.waits(row, computing):
                computing.append(row)
                line.append(row)
                if len(line) == seats:
                    break
        return line

    def _looking(self, candidates: list[Row]) -> Row | None:
        """The row that encodes an image in this step, if any has one left: the oldest. It gets no span, so
        that a step has one large piece of work; others with images wait for their turn."""
        return min((row for row in candidates if row.unseen), key=lambda row: row.arrival, default=None)

    def _admit(self, row: Row) -> NewRow:
        del self._waiting[row.arrival]
        for other in self._waiting.values():
            if other.arrival < row.arrival:
                other.overtaken += 1
        row.id = self._next_id
        self._next_id += 1
        row.known = row.request.prompt_token_ids + tuple(row.output)
        row.overtaken = 0
        restore = self.prefixes.take_over(row)
        row.prefilled = restore.tokens if restore is not None else 0
        self._live[row.id] = row
        if row.timing.admitted is None:
            row.timing.admitted = self._clock()
            row.cached = row.prefilled
        elif not row.output:  # what it began with went, maybe; what it left itself is no gain
            row.cached = min(row.cached, row.prefilled)
        media = row.request.media if row.unseen else None
        prompt = row.request.prompt_token_ids if media is not None else ()
        constraint, thinking = row.request.constraint, row.request.thinking
        follows = constraint is not None or thinking is not None
        known = row.known if row.request.sampling.counts_tokens or follows else ()
        return NewRow(
            row.id,
            row.request.sampling,
            row.seed,
            row.drawn,
            media,
            prompt,
            known,
            restore,
            constraint,
            thinking,
        )

    def _launch_span(self, row: Row, tokens: int) -> Span:
        assert row.id is not None
        start, end = row.prefilled, row.prefilled + tokens
        end = min(end, len(row.known))
        if row.prefix is not None:
            end = row.prefix.span_end(start, end)
        row.prefilled = end
        last = end == len(row.known)
        row.launched += last
        return Span(row.id, start, row.known[start:end], last)

    def _retry_after(self) -> float:
        """Seconds in which half of the queue is worked off at the pace of the last finished rows."""
        least, most = RETRY_AFTER
        times = self._finish_times
        if len(times) < 2:
            return least
        pace = (self._clock() - times[0]) / len(times)
        return min(max(pace * self.waiting / 2, least), most)
