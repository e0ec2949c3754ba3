"""Letting kept prefixes go: who asks is told when a plan made after that has been carried out."""

from __future__ import annotations

import asyncio

from chairlift.engine.kept import KeptPrefixes
from chairlift.engine.plan import StepPlan
from chairlift.engine.scheduler import Scheduler


async def test_who_asks_while_a_plan_is_carried_out_waits_for_the_next() -> None:
    scheduler = Scheduler(
        max_num_seqs=1, max_num_batched_tokens=16, max_waiting=1, context_length=64, clock=lambda: 0.0
    )

    def submit(request: object) -> object:
        raise AssertionError

    kept = KeptPrefixes(scheduler, None, submit, lambda: None)  # type: ignore[arg-type]
    first = asyncio.ensure_future(kept.clear(disk=False))
    await asyncio.sleep(0)
    plan = scheduler.schedule()
    second = asyncio.ensure_future(kept.clear(disk=False))
    await asyncio.sleep(0)
    kept.carried_out(plan)
    assert (await first).memory == 0 and not second.done()
    later = scheduler.schedule()
    assert plan.tidy and later.tidy and later.number > plan.number
    kept.carried_out(later)
    assert (await second).memory == 0
    third = asyncio.ensure_future(kept.clear(disk=False))
    await asyncio.sleep(0)
    kept.carried_out()
    await third
    kept.carried_out(StepPlan(99))
