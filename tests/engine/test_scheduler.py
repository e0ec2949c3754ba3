"""Budget, fairness, bounds, look-ahead and recovery of the scheduler, step by step."""

from __future__ import annotations

import pytest

from chairlift.engine.errors import ContextLengthExceeded, QueueFull
from chairlift.engine.line import RETRY_AFTER
from chairlift.engine.memory.rows import MAX_OVERTAKEN
from chairlift.engine.plan import Sample, StepPlan, StepResult
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import Row, RowState
from chairlift.engine.scheduler import MAX_LOSSES, Scheduler
from chairlift.engine.sharing import MIN_CHUNK


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    *, seqs: int = 8, tokens: int = 64, waiting: int = 100, context: int = 100_000, clock: Clock | None = None
) -> Scheduler:
    return Scheduler(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_waiting=waiting,
        context_length=context,
        clock=clock or Clock(),
    )


def add(
    scheduler: Scheduler, prompt: int, max_tokens: int | None = 10, *, priority: int = 0, seed: int = 0
) -> Row:
    tokens = tuple(index % 250 for index in range(prompt))
    return scheduler.add(Request("r", tokens, SamplingParams(max_tokens=max_tokens), priority), seed)


def drawing(plan: StepPlan) -> list[int]:
    return [*plan.decode, *(span.row for span in plan.prefill if span.last)]


def result_of(plan: StepPlan, token: int = 7) -> StepResult:
    return StepResult(plan.number, {id: Sample(token) for id in drawing(plan)})


def spans(plan: StepPlan) -> dict[int, int]:
    return {span.row: len(span.tokens) for span in plan.prefill}


def run(scheduler: Scheduler, steps: int, before: StepPlan | None = None) -> list[StepPlan]:
    """Plan and commit with one step of look-ahead; rows that reach their limit are finished."""
    plans = []
    for _ in range(steps):
        plan = scheduler.schedule()
        committed = scheduler.commit(result_of(before) if before is not None and not before.idle else None)
        for row, _ in committed.drawn:
            if row.drawn == row.limit:
                scheduler.finish(row)
        before = plan
        plans.append(plan)
    return plans


class TestLookAhead:
    def test_a_short_request_from_beginning_to_end(self) -> None:
        scheduler = make()
        row = add(scheduler, prompt=3, max_tokens=2, seed=5)
        assert row.state is RowState.WAITING
        first = scheduler.schedule()
        assert [(new.row, new.seed, new.drawn) for new in first.admit] == [(1, 5, 0)]
        assert [(span.row, span.start, span.tokens, span.last) for span in first.prefill] == [
            (1, 0, (0, 1, 2), True)
        ]
        assert row.state is RowState.RUNNING and row.launched == 1 and row.drawn == 0
        assert scheduler.commit(None).drawn == []
        second = scheduler.schedule()
        assert second.decode == (1,) and not second.prefill
        assert scheduler.commit(result_of(first, 11)).drawn == [(row, Sample(11))]
        third = scheduler.schedule()
        assert third.idle, "both draws are launched, so nothing is left to compute"
        assert third.release == (1,), "and its state goes before the last draw is seen"
        assert scheduler.commit(result_of(second, 12)).drawn == [(row, Sample(12))]
        assert row.output == [11, 12] and row.drawn == row.limit
        scheduler.finish(row)
        assert row.state is RowState.FINISHED and not scheduler.busy

    def test_an_answer_that_stops_on_its_content_wastes_one_draw(self) -> None:
        scheduler = make()
        row = add(scheduler, prompt=3)
        first = scheduler.schedule()
        second = scheduler.schedule()
        scheduler.commit(result_of(first))
        scheduler.finish(row)
        third = scheduler.schedule()
        assert third.idle and third.release == second.decode
        assert scheduler.commit(result_of(second)).drawn == []
        assert scheduler.wasted == 1 and row.output == [7]

    def test_no_draw_past_the_end_of_the_context(self) -> None:
        scheduler = make(context=12)
        row = add(scheduler, prompt=9, max_tokens=None)
        assert row.limit == 3
        assert sum(len(drawing(plan)) for plan in run(scheduler, 8)) == 3

    def test_max_tokens_is_clamped_to_the_context(self) -> None:
        assert add(make(context=12), prompt=9, max_tokens=50).limit == 3
        assert add(make(context=12), prompt=9, max_tokens=2).limit == 2
        assert add(make(context=12), prompt=11, max_tokens=None).limit == 1


class TestAdmission:
    @pytest.mark.parametrize("prompt", [12, 13, 500])
    def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(self, prompt: int) -> None:
        scheduler = make(context=12)
        with pytest.raises(ContextLengthExceeded, match=f"{prompt} tokens.* 12 tokens"):
            add(scheduler, prompt)
        assert not scheduler.busy

    def test_rows_are_bounded_and_the_next_moves_up(self) -> None:
        scheduler = make(seqs=2)
        rows = [add(scheduler, 3) for _ in range(3)]
        scheduler.schedule()
        assert [row.state for row in rows] == [RowState.RUNNING, RowState.RUNNING, RowState.WAITING]
        assert (scheduler.running, scheduler.waiting) == (2, 1)
        scheduler.finish(rows[0])
        plan = scheduler.schedule()
        assert plan.release == (1,) and [new.row for new in plan.admit] == [3]

    def test_the_queue_is_bounded_beyond_the_free_seats(self) -> None:
        scheduler = make(seqs=2, waiting=3)
        for _ in range(5):
            add(scheduler, 3)
        with pytest.raises(QueueFull) as refused:
            add(scheduler, 3)
        assert refused.value.retry_after == RETRY_AFTER[0]
        scheduler.schedule()
        with pytest.raises(QueueFull):
            add(scheduler, 3)
        scheduler.finish(scheduler.rows[0])
        add(scheduler, 3)

    @pytest.mark.parametrize(
        ("pace", "expected"), [(2.0, 10.0), (0.001, RETRY_AFTER[0]), (50.0, RETRY_AFTER[1])]
    )
    def test_retry_after_is_half_the_queue_at_the_recent_pace(self, pace: float, expected: float) -> None:
        clock = Clock()
        scheduler = make(seqs=1, waiting=10, clock=clock)
        for _ in range(9):
            scheduler.finish(add(scheduler, 3))
            clock.now += pace
        add(scheduler, 3)
        scheduler.schedule()
        for _ in range(10):
            add(scheduler, 3)
        with pytest.raises(QueueFull) as refused:
            add(scheduler, 3)
        assert refused.value.retry_after == pytest.approx(expected)

    def test_times_are_taken_from_the_clock(self) -> None:
        clock = Clock()
        scheduler = make(clock=clock)
        row = add(scheduler, 3)
        clock.now += 1
        scheduler.schedule()
        clock.now += 1
        scheduler.preempt(row)
        scheduler.schedule()
        scheduler.finish(row)
        assert (row.timing.queued, row.timing.admitted, row.timing.finished) == (100, 101, 102)


class TestBudget:
    def test_a_long_prompt_comes_in_chunks_beside_decode(self) -> None:
        scheduler = make(tokens=64)
        running = [add(scheduler, 4, 100) for _ in range(4)]
        plans = run(scheduler, 1)
        long = add(scheduler, 150)
        plans += run(scheduler, 4, plans[-1])
        for plan in plans[1:]:
            assert plan.decode[:4] == tuple(row.id for row in running), "no running row misses a step"
        assert [sum(spans(plan).values()) for plan in plans[1:]] == [60, 60, 30, 0]
        assert plans[4].decode[-1] == long.id

    def test_prefill_gets_a_chunk_even_if_decode_fills_the_budget(self) -> None:
        scheduler = make(seqs=41, tokens=40)
        for _ in range(40):
            add(scheduler, 1, 100)
        plans = run(scheduler, 1)
        add(scheduler, 50)
        plan = run(scheduler, 1, plans[-1])[0]
        assert len(plan.decode) == 40 and list(spans(plan).values()) == [MIN_CHUNK]

    def test_a_budget_below_a_chunk_is_kept_to(self) -> None:
        scheduler = make(tokens=3)
        add(scheduler, 7)
        assert [list(spans(plan).values()) for plan in run(scheduler, 4)] == [[3], [3], [1], []]

    @pytest.mark.parametrize(
        ("prompt", "chunks"),
        [(65, [49, 16]), (64, [64]), (79, [63, 16]), (80, [64, 16]), (130, [64, 50, 16])],
    )
    def test_no_stub_is_left(self, prompt: int, chunks: list[int]) -> None:
        scheduler = make(tokens=64)
        add(scheduler, prompt)
        assert [size for plan in run(scheduler, 4) for size in spans(plan).values()] == chunks


class TestFairness:
    def test_short_prompts_do_not_wait_behind_a_long_one(self) -> None:
        scheduler = make(tokens=64)
        long = add(scheduler, 32_000)
        plans = run(scheduler, 1)
        short = add(scheduler, 20)
        shorter = add(scheduler, 12)
        plan = run(scheduler, 1, plans[-1])[0]
        assert spans(plan) == {long.id: 32, short.id: 20, shorter.id: 12}

    def test_the_oldest_prompt_keeps_a_quarter_under_a_stream_of_short_ones(self) -> None:
        scheduler = make(tokens=64, seqs=1000)
        long = add(scheduler, 640)
        before = None
        while (left := long.remaining) > 0:
            for _ in range(3):
                add(scheduler, 30, 1)
            before = run(scheduler, 1, before)[0]
            chunks = spans(before)
            assert long.id is not None
            assert chunks[long.id] >= min(left, sum(chunks.values()) / 4)
            assert sum(chunks.values()) > 64 - len(before.decode) - MIN_CHUNK

    def test_among_the_others_priority_comes_before_length(self) -> None:
        scheduler = make(tokens=64)
        oldest, short, urgent = add(scheduler, 640), add(scheduler, 30), add(scheduler, 48, priority=-1)
        plan = scheduler.schedule()
        assert spans(plan) == {oldest.id: 16, urgent.id: 48}
        assert short.state is RowState.WAITING

    def test_the_more_urgent_takes_the_free_seat(self) -> None:
        scheduler = make(seqs=1)
        normal, urgent = add(scheduler, 3), add(scheduler, 3, priority=-5)
        scheduler.schedule()
        assert (normal.state, urgent.state) == (RowState.WAITING, RowState.RUNNING)

    def test_nobody_is_passed_for_ever(self) -> None:
        scheduler = make(seqs=1)
        humble = add(scheduler, 3, priority=10)
        passed = 0
        while humble.state is RowState.WAITING:
            urgent = add(scheduler, 3)
            scheduler.schedule()
            passed += urgent.state is RowState.RUNNING
            assert passed <= MAX_OVERTAKEN
            scheduler.finish(urgent)
        assert passed == MAX_OVERTAKEN

    def test_a_row_in_the_queue_that_got_no_tokens_holds_no_seat(self) -> None:
        scheduler = make(tokens=32)
        rows = [add(scheduler, 500) for _ in range(3)]
        plan = scheduler.schedule()
        assert [new.row for new in plan.admit] == [rows[0].id, rows[1].id]
        assert rows[2].state is RowState.WAITING and rows[2].timing.admitted is None


class TestCancel:
    def test_while_waiting_nothing_is_released(self) -> None:
        scheduler = make()
        scheduler.finish(add(scheduler, 3))
        assert not scheduler.busy

    def test_in_mid_prefill(self) -> None:
        scheduler = make(tokens=32)
        row = add(scheduler, 100)
        first = scheduler.schedule()
        scheduler.finish(row)
        second = scheduler.schedule()
        assert second.release == (1,) and second.idle
        assert scheduler.commit(result_of(first)).drawn == []
        assert not scheduler.busy

    def test_twice_releases_once(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        scheduler.schedule()
        scheduler.finish(row)
        scheduler.finish(row)
        assert scheduler.schedule().release == (1,)
        assert scheduler.schedule().release == ()


class TestPreemption:
    def test_the_row_resumes_with_its_tokens(self) -> None:
        scheduler = make()
        row = add(scheduler, 3, seed=9)
        plans = run(scheduler, 3)
        assert row.output == [7, 7] and row.launched == 3
        scheduler.preempt(row)
        assert row.state is RowState.WAITING and row.output == [7, 7]
        plan = scheduler.schedule()
        assert plan.release == (1,)
        assert [(new.row, new.seed, new.drawn) for new in plan.admit] == [(2, 9, 2)]
        assert [(span.start, span.tokens, span.last) for span in plan.prefill] == [(0, (0, 1, 2, 7, 7), True)]
        assert scheduler.commit(result_of(plans[-1], 99)).drawn == [], "the draw in flight is drawn again"
        scheduler.schedule()
        scheduler.commit(result_of(plan, 8))
        assert row.output == [7, 7, 8]
        assert scheduler.preemptions == 1

    def test_it_goes_before_younger_ones(self) -> None:
        scheduler = make(seqs=1)
        row, younger = add(scheduler, 3), add(scheduler, 3)
        scheduler.schedule()
        scheduler.preempt(row)
        scheduler.schedule()
        assert (row.state, younger.state) == (RowState.RUNNING, RowState.WAITING)

    def test_without_state_nothing_happens(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        scheduler.preempt(row)
        scheduler.finish(row)
        scheduler.preempt(row)
        assert not scheduler.busy and scheduler.preemptions == 0


class TestFaults:
    def test_a_failed_row_ends_and_the_others_go_on(self) -> None:
        scheduler = make()
        bad, good = add(scheduler, 3), add(scheduler, 3)
        first = scheduler.schedule()
        second = scheduler.schedule()
        committed = scheduler.commit(StepResult(first.number, {2: Sample(5)}, failed={1: "broken"}))
        assert committed.failed == [(bad, "broken")] and committed.drawn == [(good, Sample(5))]
        third = scheduler.schedule()
        assert third.decode == (2,) and third.release == (), "its state is gone already"
        # The step launched meanwhile still speaks of it, in whatever way.
        late = StepResult(second.number, {2: Sample(6)}, lost={1: "gone"})
        assert scheduler.commit(late).failed == []
        assert bad.state is RowState.FINISHED and good.output == [5, 6]

    def test_lost_rows_are_started_again(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.commit(result_of(first, 5))
        scheduler.schedule()
        committed = scheduler.commit(StepResult(second.number, lost={1: "gone"}))
        assert committed.failed == [] and row.state is RowState.WAITING
        plan = scheduler.schedule()
        assert [(new.row, new.drawn) for new in plan.admit] == [(2, 1)] and plan.release == ()
        assert plan.prefill[0].tokens == (0, 1, 2, 5)

    def test_losing_the_step_in_flight_too_counts_once(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.commit(StepResult(first.number, lost={1: "gone"}))
        scheduler.schedule()
        scheduler.commit(StepResult(second.number, lost={1: "gone"}))
        assert row.losses == 1 and row.state is RowState.RUNNING

    def test_a_row_lost_too_often_without_progress_fails(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        for _ in range(MAX_LOSSES):
            plan = scheduler.schedule()
            assert scheduler.commit(StepResult(plan.number, lost={drawing(plan)[0]: "gone"})).failed == []
        plan = scheduler.schedule()
        committed = scheduler.commit(StepResult(plan.number, lost={drawing(plan)[0]: "gone"}))
        assert committed.failed == [(row, "gone")] and not scheduler.busy

    def test_progress_forgives_losses(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        for _ in range(3 * MAX_LOSSES):
            plan = scheduler.schedule()
            scheduler.commit(StepResult(plan.number, lost={drawing(plan)[0]: "gone"}))
            plan = scheduler.schedule()
            scheduler.commit(result_of(plan))
        assert row.drawn == 3 * MAX_LOSSES

    def test_a_row_of_which_the_step_says_nothing_is_lost(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        plan = scheduler.schedule()
        scheduler.commit(StepResult(plan.number))
        assert row.state is RowState.WAITING
        plan = scheduler.schedule()
        assert plan.release == (1,) and plan.admit[0].row == 2, "whether its state is gone is unknown"

    def test_no_result_where_one_is_due_loses_the_step(self) -> None:
        scheduler = make()
        row = add(scheduler, 3)
        scheduler.schedule()
        scheduler.schedule()
        scheduler.commit(None)
        assert row.losses == 1 and row.state is RowState.WAITING

    def test_abandon_ends_what_was_in_flight_and_nothing_else(self) -> None:
        scheduler = make(tokens=32)
        first, second = add(scheduler, 30), add(scheduler, 2)
        waiting = add(scheduler, 600)
        scheduler.schedule()
        assert waiting.state is RowState.WAITING
        assert scheduler.abandon() == [first, second]
        plan = scheduler.schedule()
        assert plan.release == (1, 2) and [new.row for new in plan.admit] == [3]
        assert waiting.state is RowState.PREFILLING


def test_chunks_of_a_large_budget_are_even() -> None:
    """A device plans anew for every new length, so chunks come in few sizes whatever runs beside them."""
    scheduler = make(tokens=1024)
    for _ in range(3):
        add(scheduler, 40)
    plans = run(scheduler, 2)
    add(scheduler, 3000)
    plans += run(scheduler, 4, plans[-1])
    chunks = [sum(spans(plan).values()) for plan in plans[2:]]
    assert [size % 64 for size in chunks[:2]] == [0, 0]
    assert sum(chunks) == 3000
