"""Any sequence of requests, steps, cancels, preemptions and faults keeps the scheduler's promises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.engine.errors import QueueFull
from chairlift.engine.plan import NewRow, StepPlan, StepResult
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import Row, RowState
from chairlift.engine.scheduler import Committed, Scheduler
from chairlift.engine.sharing import MIN_CHUNK
from tests.engine.fake_disk import FakeDisk
from tests.fakes import FakeRow, FakeRunner, Fault, letters

CONTEXT = 400


def solo(row: Row) -> list[int]:
    """The tokens that the fake draws for this request when nothing else happens."""
    fake = FakeRow(NewRow(0, row.request.sampling, row.seed), [*row.request.prompt_token_ids])
    for _ in range(row.limit):
        fake.tokens.append(letters(fake))
        fake.drawn += 1
    return fake.tokens[len(row.request.prompt_token_ids) :]


SPECS = (None, PrefixSpec(4, 1), PrefixSpec(4, 1, checkpoint_bytes=6, checkpoint_tokens=16))
"""Nothing is kept; a model that resumes anywhere; one that resumes at checkpoints."""


def make(
    seqs: int,
    tokens: int,
    waiting: int,
    spec: PrefixSpec | None = None,
    room: int = 10**6,
    disk: FakeDisk | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Scheduler:
    return Scheduler(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_waiting=waiting,
        context_length=CONTEXT,
        clock=clock,
        prefixes=Prefixes(PrefixIndex(spec, room) if spec is not None else None, clock, catalogue=disk),
    )


@dataclass
class Driver:
    """Does what the engine does, without its loop: plan, run, commit, finish."""

    scheduler: Scheduler
    runner: FakeRunner = field(default_factory=FakeRunner)
    rows: list[Row] = field(default_factory=list)
    expected: dict[int, list[int]] = field(default_factory=dict)
    """By arrival: what the row draws alone."""
    reached_limit: set[int] = field(default_factory=set)
    """Arrivals of rows that ended at their limit, and never on content or by a cancel."""
    disk: FakeDisk | None = None

    def add(
        self, prompt: int | list[int], max_tokens: int | None, *, priority: int = 0, seed: int = 0
    ) -> Row:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=seed % 2)
        if isinstance(prompt, int):
            prompt = [(seed + index) % 251 for index in range(prompt)]
        request = Request("r", tuple(prompt), sampling, priority)
        row = self.scheduler.add(request, seed)
        self.rows.append(row)
        self.expected[row.arrival] = solo(row)
        return row

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if self.disk is not None:
            self.disk.follow(self.scheduler)
        try:
            result = self.runner.step(plan)
        except RuntimeError:
            self.scheduler.abandon()
            return None
        self.take(self.scheduler.commit(result), result)
        if self.disk is not None:
            self.disk.follow(self.scheduler)
        return plan

    def take(self, committed: Committed, result: StepResult | None) -> None:
        for row, sample in committed.drawn:
            assert row.output[-1] == sample.token and not row.finished
            if row.drawn == row.limit:
                self.reached_limit.add(row.arrival)
                self.scheduler.finish(row)
        for row, _ in committed.failed:
            assert row.finished


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        seqs=st.integers(1, 6),
        tokens=st.integers(1, 80),
        waiting=st.integers(0, 6),
        spec=st.sampled_from(SPECS),
        room=st.one_of(st.integers(0, 300), st.just(10**6)),
        with_disk=st.booleans(),
    )
    def begin(
        self, seqs: int, tokens: int, waiting: int, spec: PrefixSpec | None, room: int, with_disk: bool
    ) -> None:
        self.now = 0.0
        self.disk = FakeDisk() if with_disk else None
        scheduler = make(seqs, tokens, waiting, spec, room, self.disk, lambda: self.now)
        self.driver = Driver(scheduler, disk=self.disk)
        self.scheduler, self.runner = self.driver.scheduler, self.driver.runner
        if self.disk is not None:
            self.runner.spill(self.disk)

    @precondition(lambda self: self.disk is not None and self.disk.pending)
    @rule(data=st.data(), most=st.one_of(st.none(), st.integers(0, 20)), seconds=st.sampled_from([0, 0, 31]))
    def answer(self, data: st.DataObject, most: int | None, seconds: float) -> None:
        assert self.disk is not None
        self.now += seconds
        self.disk.answer(self.scheduler, data.draw(st.integers(0, len(self.disk.pending) - 1)), most)

    @precondition(lambda self: self.scheduler.prefixes.index is not None)
    @rule()
    def forget(self) -> None:
        """Memory loses what it keeps."""
        assert self.scheduler.prefixes.index is not None
        self.scheduler.prefixes.index.clear()

    @precondition(lambda self: self.disk is not None)
    @rule(full=st.booleans(), lost=st.lists(st.integers(0, 50), max_size=3))
    def harm(self, full: bool, lost: list[int]) -> None:
        """The disk takes nothing for a while, and files go."""
        assert self.disk is not None
        self.disk.full = full
        for at in lost:
            if at < len(self.disk.files):
                del self.disk.files[list(self.disk.files)[at]]

    @rule(
        prompt=st.one_of(st.integers(1, 20), st.integers(1, CONTEXT - 1)),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 2**64 - 1),
    )
    def submit(self, prompt: int, max_tokens: int | None, priority: int, seed: int) -> None:
        try:
            self.driver.add(prompt, max_tokens, priority=priority, seed=seed)
        except QueueFull:
            free = max(0, self.scheduler.max_num_seqs - self.scheduler.running)
            assert self.scheduler.waiting >= self.scheduler.max_waiting + free

    @precondition(lambda self: self.driver.rows)
    @rule(data=st.data(), kept=st.floats(0, 1), more=st.integers(0, 20), max_tokens=st.integers(1, 12))
    def follow(self, data: st.DataObject, kept: float, more: int, max_tokens: int) -> None:
        """A prompt that begins as an earlier one and its answer."""
        row = data.draw(st.sampled_from(self.driver.rows))
        tokens = [*row.request.prompt_token_ids, *row.output]
        prompt = [*tokens[: int(kept * len(tokens)) + 1], *range(more)][: CONTEXT - 1]
        with suppress(QueueFull):
            self.driver.add(prompt, max_tokens, seed=data.draw(st.integers(0, 3)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.check(self.driver.step())

    @precondition(lambda self: self.scheduler.rows)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.scheduler.rows))
        self.scheduler.finish(row)
        assert row.state is RowState.FINISHED

    @precondition(lambda self: self.scheduler.rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.scheduler.rows))
        output = list(row.output)
        self.scheduler.preempt(row)
        assert row.state is RowState.WAITING and row.output == output

    @rule(
        kind=st.sampled_from(["fail", "lose", "silent", "error"]),
        which=st.lists(st.booleans(), min_size=1, max_size=6),
    )
    def fault(self, kind: str, which: list[bool]) -> None:
        def chosen(plan: StepPlan) -> list[int]:
            return [id for index, id in enumerate(plan.rows) if which[index % len(which)]]

        if kind == "error":
            self.runner.fail_next(Fault(error=RuntimeError("The fake raised.")))
        else:
            self.runner.fail_next(Fault(**{kind: chosen}))
        self.check(self.driver.step())

    def check(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        budget = self.scheduler.max_num_batched_tokens
        tokens = len(plan.decode) + sum(len(span.tokens) for span in plan.prefill)
        assert tokens <= max(budget, len(plan.decode) + min(MIN_CHUNK, budget))
        assert not (self.waiting_for_tokens and plan.idle), "something to compute, and nothing planned"

    @property
    def waiting_for_tokens(self) -> bool:
        return any(row.state is RowState.PREFILLING for row in self.scheduler.rows)

    @invariant()
    def keeps_to_the_protocol(self) -> None:
        assert self.runner.violations == []
        assert len(self.runner.released) == len(set(self.runner.released))

    @invariant()
    def holds_no_more_rows_than_seats(self) -> None:
        assert self.scheduler.running <= self.scheduler.max_num_seqs
        assert len(self.runner.rows) <= self.scheduler.max_num_seqs + len(self.scheduler._release)

    @invariant()
    def keeps_within_its_room(self) -> None:
        index = self.scheduler.prefixes.index
        if index is not None:
            assert index.used == sum(index._entries.values()) <= index.limit
            assert all(node.parent is None or not node.parent.dead for node in index._nodes.values())

    @invariant()
    def counts_agree(self) -> None:
        for row in self.scheduler.rows:
            assert not row.finished
            assert row.drawn <= row.launched <= min(row.limit, row.drawn + 2)
            assert row.prefilled <= len(row.known)

    @invariant()
    def draws_are_those_of_a_solo_run(self) -> None:
        for row in self.driver.rows:
            assert row.output == self.driver.expected[row.arrival][: row.drawn]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for _ in range(2000):
            if not self.scheduler.busy:
                break
            pause = self.scheduler.pause
            assert pause is not None
            self.now += pause
            self.check(self.driver.step())
        assert not self.scheduler.busy
        assert self.runner.rows == {}, "states are left on the runner"
        if (index := self.scheduler.prefixes.index) is not None:
            gone = {*index.take_dropped(), *self.runner._spoiled}
            assert self.runner.pages.keys() - gone == index._by_id.keys() - gone
        assert self.runner.violations == []
        for row in self.driver.rows:
            assert row.finished and row.id is None and row.known == ()
            if row.arrival in self.driver.reached_limit:
                assert row.output == self.driver.expected[row.arrival]


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase

rows = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 20), st.integers(1, CONTEXT - 1)), st.integers(1, 8), st.integers(-2, 2)
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(rows=rows, seqs=st.integers(1, 6), tokens=st.integers(1, 80))
def test_every_row_gets_its_tokens_within_a_bound(
    rows: list[tuple[int, int, int]], seqs: int, tokens: int
) -> None:
    """No row waits longer than if all work were done one after the other, at a quarter of the budget."""
    scheduler = Scheduler(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_waiting=100,
        context_length=CONTEXT,
        clock=lambda: 0,
    )
    driver = Driver(scheduler)
    for prompt, max_tokens, priority in rows:
        driver.add(prompt, max_tokens, priority=priority)
    part = max(1, min(MIN_CHUNK, tokens) // 4)
    bound = sum(-(-prompt // part) + max_tokens + 2 for prompt, max_tokens, _ in rows) + 2
    steps = 0
    while scheduler.busy:
        driver.step()
        steps += 1
        assert steps <= bound
    assert all(row.output == driver.expected[row.arrival] for row in driver.rows)
    assert driver.runner.violations == []
    draws = sum(len(plan.decode) + sum(span.last for span in plan.prefill) for plan in driver.runner.plans)
    assert draws == sum(row.limit for row in driver.rows), "rows that end at their limit draw nothing more"
    assert scheduler.wasted == 0


@settings(deadline=None)
@given(
    prompts=st.lists(st.integers(1, CONTEXT - 1), min_size=2, max_size=8),
    tokens=st.integers(2 * MIN_CHUNK, 128),
)
def test_the_oldest_prompt_advances_by_a_quarter_of_the_budget(prompts: list[int], tokens: int) -> None:
    scheduler = make(8, tokens, waiting=8)
    driver = Driver(scheduler)
    for prompt in prompts:
        driver.add(prompt, 100)
    while waiting := [row for row in driver.rows if row.remaining and not row.finished]:
        oldest, before = waiting[0], waiting[0].remaining
        plan = driver.step()
        assert plan is not None
        budget = max(MIN_CHUNK, tokens - len(plan.decode))
        assert before - oldest.remaining >= min(before, budget // 4)
        granted = sum(len(span.tokens) for span in plan.prefill)
        left = sum(row.remaining for row in driver.rows if not row.finished)
        assert left == 0 or granted > budget - 2 * MIN_CHUNK, "the budget is used while there is work"
