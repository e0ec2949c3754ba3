"""What goes wrong in one row, one step or one text ends where it belongs, and the engine goes on."""

from __future__ import annotations

import asyncio

import pytest

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import EngineError, StepFailed
from chairlift.engine.events import Failed, Finished, FinishReason, Usage
from chairlift.engine.plan import RunnerStats, StepPlan
from chairlift.engine.prefix.row import RowPrefix
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.scheduler import MAX_LOSSES
from tests.engine.driving import end, events, request, settled, solo, started, tokens
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, Fault, all_rows, answering, first_row
from tests.gate import PATIENCE


async def goes_on(engine: Engine, runner: FakeRunner) -> None:
    """Nothing is left behind, and the next request is answered."""
    await settled(engine)
    assert runner.rows == {}
    assert tokens(await events(engine.submit(request("next")))) == solo(request("next"), 8)


def when(count: int, fault: Fault) -> FakeRunner:
    """A runner with this fault in the first plan in which so many rows decode."""
    left = [fault]
    return FakeRunner(fault=lambda plan: left.pop() if left and len(plan.decode) == count else None)


async def test_a_row_at_fault_ends_alone() -> None:
    runner = when(3, Fault(fail=first_row))
    async with started(runner) as engine:
        asked = [request(prompt, max_tokens=20) for prompt in ("one", "two", "three")]
        found = await asyncio.gather(*(events(engine.submit(each)) for each in asked))
        failed = found[0][-1]
        assert isinstance(failed, Failed) and isinstance(failed.error, StepFailed)
        assert failed.error.message == "The fake failed this row."
        drawn = tokens(found[0])
        assert failed.usage == Usage(3, len(drawn)) and drawn == solo(asked[0], len(drawn))
        assert [tokens(each) for each in found[1:]] == [solo(each, 20) for each in asked[1:]]
        assert engine.stats().finished == {FinishReason.ERROR: 1, FinishReason.LENGTH: 2}
        await goes_on(engine, runner)


KEEPING = EngineConfig(prefix_cache_bytes=10**6, max_num_batched_tokens=8)
PREFIX = PrefixSpec(block_tokens=4, bytes_per_token=4)


async def test_what_a_row_at_fault_left_is_given_back_though_nothing_follows() -> None:
    runner = FakeRunner()
    async with started(runner, KEEPING, prefix=PREFIX) as engine:
        kept = set(runner.pages)
        runner.fault = lambda plan: Fault(fail=[span.row for span in plan.prefill if span.last])
        assert isinstance(await end(engine.submit(request("a prompt of some length", max_tokens=1))), Failed)
        await settled(engine)
        assert set(runner.pages) == kept
        runner.fault = lambda plan: None
        await goes_on(engine, runner)


@pytest.mark.parametrize("name", ["at_end", "take_over"])
async def test_nobody_waits_for_ever_when_the_books_of_prefixes_go_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner()
    async with started(runner, KEEPING, prefix=PREFIX) as engine:

        def wrong(*_: object) -> None:
            raise RuntimeError("The books are wrong.")

        with monkeypatch.context() as patch:
            patch.setattr(RowPrefix, name, wrong)
            asked = [engine.submit(request("a prompt", max_tokens=count)) for count in (1, 5, 20)]
            async with asyncio.timeout(PATIENCE):
                ends = await asyncio.gather(*map(end, asked))
            assert all(isinstance(each, Failed) and isinstance(each.error, StepFailed) for each in ends)
        assert "The books are wrong." in caplog.text
        await goes_on(engine, runner)


async def test_lost_rows_give_the_same_answers() -> None:
    runner = when(3, Fault(lose=all_rows))
    async with started(runner) as engine:
        asked = [request(prompt, max_tokens=20, temperature=1, seed=4) for prompt in ("one", "two", "three")]
        found = await asyncio.gather(*(events(engine.submit(each)) for each in asked))
        assert [tokens(each) for each in found] == [solo(each, 20, seed=4) for each in asked]
        assert engine.stats().lost == 3
        resumed = [new.drawn for plan in runner.plans for new in plan.admit if new.drawn]
        assert len(resumed) == 3


async def test_rows_that_are_lost_again_and_again_fail() -> None:
    runner = FakeRunner(fault=lambda plan: Fault(lose=all_rows) if runner.plans[3:] else None)
    async with started(runner) as engine:
        failed = await end(engine.submit(request()))
        assert isinstance(failed, Failed) and failed.error.message == "The fake lost this row."
        assert len([new for plan in runner.plans for new in plan.admit]) == 1 + 1 + MAX_LOSSES
        runner.fault = lambda plan: None
        await goes_on(engine, runner)


async def test_a_runner_that_raises_ends_the_rows_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    runner = when(2, Fault(error=RuntimeError("The device is gone.")))
    async with started(runner, EngineConfig(max_num_seqs=2)) as engine:
        handles = [engine.submit(request(prompt, max_tokens=20)) for prompt in ("one", "two", "three")]
        *first, third = await asyncio.gather(*(events(handle) for handle in handles))
        for found in first:
            failed = found[-1]
            assert isinstance(failed, Failed) and isinstance(failed.error, StepFailed)
            assert "device" not in failed.error.message, "the client learns nothing of the inside"
        assert tokens(third) == solo(request("three"), 20), "who was not in the step is not touched"
        await goes_on(engine, runner)
    assert "The device is gone." in caplog.text


async def test_a_runner_that_raises_on_every_step() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        runner.fault = lambda plan: Fault(error=RuntimeError("The device is gone."))
        found = await asyncio.gather(*(end(engine.submit(request())) for _ in range(5)))
        assert all(isinstance(event, Failed) for event in found)
        runner.fault = lambda plan: None
        await goes_on(engine, runner)


async def test_a_system_exit_on_the_thread_does_not_end_the_engine() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        runner.fail_next(Fault(error=SystemExit(3)))
        assert isinstance(await end(engine.submit(request())), Failed)
        await goes_on(engine, runner)


async def test_a_step_that_keeps_silent_about_a_row() -> None:
    runner = when(2, Fault(silent=first_row))
    async with started(runner) as engine:
        asked = [request(prompt, max_tokens=20) for prompt in ("one", "two")]
        found = await asyncio.gather(*(events(engine.submit(each)) for each in asked))
        assert [tokens(each) for each in found] == [solo(each, 20) for each in asked]
        await goes_on(engine, runner)


class Unreadable(FakeTokenizer):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if ord("x") in token_ids:
            raise ValueError("What is this?")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


async def test_a_text_that_cannot_be_made_ends_its_own_request() -> None:
    runner = FakeRunner(lambda row: row.tokens[0] if row.drawn == 3 else ord("a"))
    async with started(runner, tokenizer=Unreadable()) as engine:
        bad, good = await asyncio.gather(
            *(events(engine.submit(request(prompt, max_tokens=6))) for prompt in ("x", "y"))
        )
        failed = bad[-1]
        assert isinstance(failed, Failed) and type(failed.error) is EngineError
        assert tokens(bad) == [97, 97, 97]
        assert tokens(good) == [97, 97, 97, 121, 97, 97]
        assert isinstance(good[-1], Finished)
        await settled(engine)
        assert runner.rows == {}


class Amnesiac(FakeRunner):
    def stats(self) -> RunnerStats:
        raise RuntimeError("No numbers today.")


async def test_memory_that_cannot_be_read_harms_nobody() -> None:
    runner = Amnesiac()
    async with started(runner) as engine:
        assert tokens(await events(engine.submit(request()))) == solo(request(), 8)
        assert engine.stats().runner == RunnerStats()


async def test_a_defect_in_planning_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(answering("abc"))
    async with started(runner) as engine:
        schedule, defects = engine._scheduler.schedule, [RuntimeError("A defect.")]

        def stumble() -> StepPlan:
            if defects:
                raise defects.pop()
            return schedule()

        monkeypatch.setattr(engine._scheduler, "schedule", stumble)
        assert isinstance(await end(engine.submit(request())), Failed)
        assert isinstance(await end(engine.submit(request())), Finished)
