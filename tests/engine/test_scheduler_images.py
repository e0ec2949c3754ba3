"""Rows with images: an encoding step each before their prefill, one row a step, others going on."""

from __future__ import annotations

from chairlift.engine.media import PreparedMedia
from chairlift.engine.plan import StepPlan, StepResult
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import Row, RowState
from chairlift.engine.scheduler import Scheduler
from tests.engine.test_scheduler import add, drawing, make, result_of, spans

PROMPT = tuple(range(40))


def add_seeing(scheduler: Scheduler, images: int, prompt: tuple[int, ...] = PROMPT) -> Row:
    digests = tuple(f"{len(prompt)}/{index}" for index in range(images))
    media = PreparedMedia({}, digests, (2,) * images)
    return scheduler.add(Request("r", prompt, SamplingParams(max_tokens=10), media=media), 0)


def encoded(plan: StepPlan) -> StepResult:
    """The result of a plan that encoded the last of its rows' images."""
    result = result_of(plan)
    return StepResult(plan.number, result.samples, encoded=frozenset(plan.encode))


def test_an_image_a_step_then_its_prefill_while_another_decodes() -> None:
    scheduler = make()
    other = add(scheduler, 5)
    before = scheduler.schedule()
    row = add_seeing(scheduler, 2)
    plans = []
    for _ in range(4):
        plan = scheduler.schedule()
        scheduler.commit(result_of(before))
        plans.append(plan)
        before = plan
    (new,) = plans[0].admit
    assert (new.row, new.prompt, new.media) == (row.id, PROMPT, row.request.media)
    assert [plan.encode for plan in plans] == [(row.id,), (row.id,), (), ()]
    assert [plan.decode[:1] for plan in plans] == [(other.id,)] * 4
    assert [spans(plan) for plan in plans] == [{}, {}, {row.id: 40}, {}]
    assert row.id in drawing(plans[2])


def test_what_the_runner_has_kept_costs_no_step() -> None:
    scheduler = make()
    row = add_seeing(scheduler, 9)
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.commit(encoded(first))
    third = scheduler.schedule()
    assert [plan.encode for plan in (first, second, third)] == [(row.id,), (row.id,), ()]
    assert spans(third) == {row.id: 40}


def test_one_row_a_step_the_oldest_first_and_text_beside_it() -> None:
    scheduler = make()
    first, second = add_seeing(scheduler, 1), add_seeing(scheduler, 1, PROMPT[:20])
    text = add(scheduler, 8)
    plan = scheduler.schedule()
    assert plan.encode == (first.id,)
    assert spans(plan) == {text.id: 8}
    assert second.id is None
    plan = scheduler.schedule()
    assert plan.encode == (second.id,)
    assert spans(plan) == {first.id: 40}


def test_a_preempted_row_encodes_anew() -> None:
    scheduler = make()
    row = add_seeing(scheduler, 1)
    scheduler.commit(encoded(scheduler.schedule()))
    prefill = scheduler.schedule()
    scheduler.commit(result_of(prefill))
    scheduler.preempt(row)
    assert row.state is RowState.WAITING
    again = scheduler.schedule()
    assert again.encode == (row.id,)
    assert again.admit[0].prompt == PROMPT
    assert again.admit[0].drawn == 1
    assert spans(scheduler.schedule()) == {row.id: 41}


def test_a_row_whose_images_fail_ends_and_frees_its_seat() -> None:
    scheduler = make(seqs=1)
    row, other = add_seeing(scheduler, 1), add(scheduler, 4)
    plan = scheduler.schedule()
    assert (plan.encode, other.id) == ((row.id,), None)
    failed = StepResult(plan.number, failed={row.id or 0: "no image"})
    committed = scheduler.commit(failed)
    assert committed.failed == [(row, "no image")]
    assert row.finished
    assert spans(scheduler.schedule()) == {other.id: 4}


def test_media_without_images_is_text() -> None:
    scheduler = make()
    row = add_seeing(scheduler, 0)
    plan = scheduler.schedule()
    assert (plan.encode, plan.admit[0].media, plan.admit[0].prompt) == ((), None, ())
    assert spans(plan) == {row.id: 40}


def test_a_plan_that_only_encodes_is_not_idle() -> None:
    scheduler = make()
    row = add_seeing(scheduler, 1)
    plan = scheduler.schedule()
    assert (plan.prefill, plan.decode) == ((), ())
    assert not plan.idle
    assert plan.rows == (row.id,)
