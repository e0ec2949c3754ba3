"""Rows that wait for what another computes."""

from __future__ import annotations

import pytest

from chairlift.engine.plan import Sample, StepResult
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import RowState
from chairlift.engine.scheduler import Scheduler
from tests.engine.test_scheduler_machine import Driver, make
from tests.fakes import Fault, all_rows

ANYWHERE = PrefixSpec(8, 1)
CHECKPOINTS = PrefixSpec(8, 1, checkpoint_bytes=100, checkpoint_tokens=64)


@pytest.mark.parametrize(
    ("spec", "room", "steps", "taken"),
    [
        (ANYWHERE, 10_000, 7, 399),
        (ANYWHERE, 130, 2, 128),
        (ANYWHERE, 4, 0, 0),
        (CHECKPOINTS, 10_000, 7, 392),
        (CHECKPOINTS, 150, 0, 0),
    ],
)
def test_a_row_waits_for_no_more_than_can_be_kept(
    spec: PrefixSpec, room: int, steps: int, taken: int
) -> None:
    scheduler = Scheduler(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_waiting=9,
        context_length=1000,
        clock=lambda: 0.0,
        prefixes=Prefixes(PrefixIndex(spec, room), lambda: 0.0),
    )
    _, second = (
        scheduler.add(Request("r", tuple(range(400)), SamplingParams(max_tokens=9)), 0) for _ in range(2)
    )
    waited = 0
    while True:
        plan = scheduler.schedule()
        if second.state is not RowState.WAITING:
            break
        drawing = [*plan.decode, *(span.row for span in plan.prefill if span.last)]
        scheduler.commit(StepResult(plan.number, {row: Sample(7) for row in drawing}))
        waited += 1
    assert (waited, second.cached) == (steps, taken)


def test_without_a_disk_nothing_is_remembered_of_rows_that_went_wrong() -> None:
    driver = Driver(make(4, 64, 9, ANYWHERE))
    row = driver.add(200, 4)
    driver.step()
    driver.runner.fault = lambda plan: Fault(fail=all_rows)
    while driver.scheduler.busy:
        driver.step()
    index = driver.scheduler.prefixes.index
    assert row.finished and not row.output
    assert index is not None and len(index) == 0 and index.take_distrusted() == ()
