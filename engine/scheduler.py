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
from chairlift.engine.line import looking, next_in_line, retry_after, standing
from chairlift.engine.memory.rows import RowMemory
from chairlift.engine.plan import NewRow, Sample, Span, StepPlan, StepResult
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import Save
from chairlift.engine.request import Request
from chairlift.engine.row import RequestTiming, Row
from chairlift.engine.sharing import Sharing

MAX_LOSSES = 2
"""A row is started again so many times without having drawn a token in between; then it fails."""
BLOCKED = 0.25
"""Seconds until rows that wait for other engines' memory are looked at again, unless it comes free before."""


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
        memory: says which rows may hold states; None bounds nothing.
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
        memory: RowMemory | None = None,
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
        self.memory = memory if memory is not None else RowMemory()
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
    def deferred(self) -> int:
        """Of those waiting, rows that wait for the disk."""
        return self.prefixes.deferred(self._waiting.values())

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
        if self._has_work:
            return 0.0
        return BLOCKED if self.memory.blocked else self.prefixes.pause(self._waiting.values())

    def add(self, request: Request, seed: int) -> Row:
        """Queue a request.

        `max_tokens` that cannot fit behind the prompt is clamped to the room there is: the answer ends with
        `length` at the end of the context either way.

        Raises:
            ContextLengthExceeded: the prompt fills the context, or memory could never hold the request.
            QueueFull: the wait queue is at its bound.
        """
        limit = self.limit(request)
        if self.waiting >= self.max_waiting + max(0, self.max_num_seqs - self.running):
            seconds = retry_after(self._finish_times, self._clock(), self._waiting)
            raise QueueFull(f"The server is busy: {self.waiting} requests are waiting.", seconds)
        row = Row(request, seed, limit, self._next_arrival, RequestTiming(queued=self._clock()))
        self._next_arrival += 1
        row.prefix = self.prefixes.of(request)
        self.memory.accept(row)
        self._waiting[row.arrival] = row
        return row

    def limit(self, request: Request) -> int:
        """Tokens of the answer at most: what is asked for, or what context and memory leave.

        Raises:
            ContextLengthExceeded: none, or less than what was asked for could ever be held in memory.
        """
        prompt = len(request.prompt_token_ids)
        if prompt >= self.context_length:
            raise ContextLengthExceeded(
                "prompt",
                f"The prompt has {prompt} tokens, which leaves no room for an answer: this model's context "
                f"length is {self.context_length} tokens, prompt and answer together.",
            )
        return self.memory.limit(request, self.context_length - prompt)

    def finish(self, row: Row) -> None:
        """The row has ended, for whatever reason; its state goes with the next plan. Idempotent."""
        if row.finished:
            return
        try:
            self.prefixes.keep(row)
        finally:
            self._detach(row, release=True)
            self.memory.end(row)
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
        self.prefixes.keep(row)
        self.preemptions += 1
        self._requeue(row, release=True)

    def schedule(self) -> StepPlan:
        """The next step. The caller launches it: what it holds counts as launched from now on."""
        decode, prefilling, ending = standing(self._live.values())
        for row in ending:
            self._let_go(row)
        for row in self.memory.over(decode, prefilling):
            row.preempted += 1
            self.preemptions += 1
            self._requeue(row, release=True)
            (decode if row in decode else prefilling).remove(row)
        seats = self.max_num_seqs - len(self._live)
        loads = self.prefixes.load(running=bool(self._live))
        queue = self._waiting.values()
        candidates = [*prefilling, *next_in_line(queue, prefilling, seats, self.prefixes, self.memory)]
        encode = looking(candidates)
        if encode is not None:
            candidates = [row for row in candidates if row is not encode and not row.unseen]
        grants = self._sharing.share(candidates, self._budget(len(decode))) if candidates else []
        new = [row for row in (encode, *(row for row, _ in grants)) if row is not None and row.id is None]
        ids = [row.id for row in decode if row.id is not None]
        live = [id for id, row in self._live.items() if not row.leaving]
        self.memory.reserve(new, grants, ids, live)  # before anybody begins with pages that go for it
        admit = [self._admit(row) for row in new]
        if encode is not None:
            encode.looked += 1
        live += [row.row for row in admit]
        grants = self.memory.bounded(new, grants, ids, live)
        prefill: list[Span] = []
        save: list[Save] = []
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
        settle = self.memory.launched(new, ids, [span.row for span in prefill if span.last], live)
        plan = StepPlan(
            number=self._step,
            drop=drop,
            keep=keep,
            release=tuple(self._release),
            admit=tuple(admit),
            prefill=tuple(prefill),
            decode=tuple(ids),
            encode=(encode.id,) if encode is not None and encode.id is not None else (),
            save=tuple(save),
            load=tuple(load for load in loads if load.page.id not in drop),
            tidy=self._tidy,
            settle=settle,
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
            if row is not None and id in result.scored:
                row.score(result.scored[id])
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
            if release and not row.leaving:
                self._release.append(row.id)
        row.id = None
        row.kept = row.leaving = False
        row.known = ()
        row.prefilled = row.looked = 0
        row.launched = row.drawn

    # -- plans

    def _let_go(self, row: Row) -> None:
        """The step to come needs nothing of what the row holds."""
        self.prefixes.keep(row)
        if row.id is not None and not row.leaving:
            self._release.append(row.id)
        row.leaving = True

    def _budget(self, decoding: int) -> int:
        """Prompt tokens of a step in which so many rows decode."""
        budget = self.max_num_batched_tokens - decoding
        if decoding and self._pace is not None:
            budget = min(budget, self._pace())
        return max(budget, self._sharing.least)

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
        row.looked = row.prefix.images_within(row.prefilled) if row.prefix is not None else 0
        self._live[row.id] = row
        if row.timing.admitted is None:
            row.timing.admitted = self._clock()
            row.cached = row.prefilled
        elif not row.output:  # what it began with went, maybe; what it left itself is no gain
            row.cached = min(row.cached, row.prefilled)
        return row.admission(row.id, restore, self.memory.room_for(row))

    def _launch_span(self, row: Row, tokens: int) -> Span:
        assert row.id is not None
        start, end = row.prefilled, row.span_end(tokens)
        row.prefilled = end
        last = end == len(row.known)
        row.launched += last
        return Span(row.id, start, row.known[start:end], last)
