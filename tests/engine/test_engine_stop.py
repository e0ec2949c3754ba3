"""Stopping: what is admitted, what may finish, and that it always comes to an end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import EngineStopped
from chairlift.engine.events import Failed, Finished, FinishReason, Usage
from chairlift.engine.memory.budget import Budget, Kind, Reservation
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.plan import LoadedModel
from tests.engine.driving import end, events, request, settled, solo, started, tokens
from tests.fakes import FakeRunner, fake_model
from tests.gate import PATIENCE
from tests.server.test_memory import FakeDevice

LONG = 1000.0
"""Seconds; a drain that waited for its time-out would not end in a test's life."""


def stopped(event: object) -> bool:
    return isinstance(event, Failed) and isinstance(event.error, EngineStopped)


async def test_running_answers_finish_and_waiting_ones_end_at_once() -> None:
    runner = FakeRunner()
    async with started(runner, EngineConfig(max_num_seqs=1)) as engine:
        runner.close_gate()
        running, waiting = engine.submit(request()), engine.submit(request())
        await runner.at_gate()
        stop = asyncio.create_task(engine.stop(LONG))
        assert stopped(await end(waiting))
        assert engine.draining and not engine.ready
        with pytest.raises(EngineStopped, match="shutting down"):
            engine.submit(request())
        runner.open_gate()
        found = await events(running)
        assert tokens(found) == solo(request(), 8) and isinstance(found[-1], Finished)
        await stop
        assert runner.closed


async def test_what_has_not_finished_in_time_ends_with_an_error() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        runner.close_gate()
        handle = engine.submit(request(max_tokens=1000))
        await runner.at_gate()
        await runner.let_through(3)
        stop = asyncio.create_task(engine.stop())
        found = await events(handle)
        assert stopped(found[-1]) and found[-1].usage == Usage(6, 2)  # type: ignore[union-attr]
        assert tokens(found) == solo(request(), 2)
        runner.open_gate()
        await stop
        assert runner.closed and runner.rows == {}
        assert engine.stats().finished == {FinishReason.ERROR: 1}


async def test_a_second_stop_cuts_the_drain_short() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        handle = engine.submit(request(max_tokens=None))
        await anext(handle)
        first = asyncio.create_task(engine.stop(LONG))
        await anext(handle)
        assert not first.done()
        await engine.stop()
        await first
        assert stopped(await end(handle))


async def test_a_second_stop_does_not_prolong_the_drain() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        handle = engine.submit(request(max_tokens=None))
        first = asyncio.create_task(engine.stop(0.0))
        await engine.stop(LONG)
        await first
        assert stopped(await end(handle))


async def test_a_caller_of_stop_that_gives_up_does_not_stop_the_stopping() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        runner.close_gate()
        handle = engine.submit(request())
        await runner.at_gate()
        impatient = asyncio.create_task(engine.stop(LONG))
        await runner.let_through(2)
        impatient.cancel()
        runner.open_gate()
        assert isinstance(await end(handle), Finished)
        await engine.stop(LONG)
        assert runner.closed


async def test_an_idle_engine_stops_at_once_and_twice() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        await settled(engine)
        await engine.stop(LONG)
        await engine.stop(LONG)
        assert runner.closed
        with pytest.raises(EngineStopped):
            engine.submit(request())
        with pytest.raises(EngineStopped):
            await engine.start()


async def test_a_preempted_row_is_running_and_may_finish() -> None:
    runner = FakeRunner()
    async with started(runner) as engine:
        runner.close_gate()
        handle = engine.submit(request())
        await runner.at_gate()
        await runner.let_through(3)
        (row,) = engine._scheduler.rows
        engine._scheduler.preempt(row)
        stop = asyncio.create_task(engine.stop(LONG))
        runner.open_gate()
        assert tokens(await events(handle)) == solo(request(), 8)
        await stop


async def test_a_wedged_thread_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    engine = Engine(fake_model(runner), EngineConfig(close_timeout=0.01))
    await engine.start()
    runner.close_gate()
    handle = engine.submit(request())
    await runner.at_gate()
    await engine.stop()
    assert engine.wedged and not runner.closed
    assert "given up" in caplog.text
    assert stopped(await end(handle))
    runner.open_gate()


@pytest.mark.parametrize("wedged", [True, False])
async def test_what_a_wedged_model_holds_stays_reserved(wedged: bool) -> None:
    budget = Budget(10**9)
    weights = budget.reserve(10**8, Kind.WEIGHTS)
    assert isinstance(weights, Reservation)
    runner = FakeRunner()
    factory = fake_model(runner, states=StateSizes(1000), device=FakeDevice(), weight_bytes=10**8)
    engine = Engine(factory, EngineConfig(close_timeout=0.01), budget=budget, weights=weights)
    await engine.start()
    held = budget.available
    if wedged:
        runner.close_gate()
        handle = engine.submit(request())
        await runner.at_gate()
    await engine.stop()
    assert not wedged or stopped(await end(handle))
    assert engine.wedged == wedged
    if wedged:
        assert budget.available <= held and budget.used(Kind.WEIGHTS) == 10**8 and budget.accounts
    else:
        assert budget.available == budget.total and not budget.accounts
    runner.open_gate()


async def test_a_runner_that_does_not_close_is_given_up() -> None:
    release = threading.Event()

    class Stuck(FakeRunner):
        def close(self) -> None:
            release.wait(PATIENCE)

    engine = Engine(fake_model(Stuck()), EngineConfig(close_timeout=0.01))
    await engine.start()
    await engine.stop()
    assert engine.wedged
    release.set()


async def test_a_runner_that_raises_when_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(FakeRunner):
        def close(self) -> None:
            raise RuntimeError("Not now.")

    engine = Engine(fake_model(Clumsy()))
    await engine.start()
    await engine.stop()
    assert not engine.wedged
    assert "Not now." in caplog.text


@pytest.mark.parametrize("by", ["stop", "cancel"])
async def test_stopping_while_the_model_loads(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.engine.engine.LOAD_PATIENCE", 0.01)
    loading, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def factory() -> LoadedModel:
        loop.call_soon_threadsafe(loading.set)
        release.wait(PATIENCE)
        return fake_model()()

    engine = Engine(factory)
    start = asyncio.create_task(engine.start())
    await loading.wait()
    if by == "stop":
        await engine.stop(LONG)
        with pytest.raises(EngineStopped):
            await start
    else:
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    assert engine.wedged and not engine.ready
    release.set()


async def test_stopping_during_the_self_test() -> None:
    runner = FakeRunner()
    runner.close_gate()
    engine = Engine(fake_model(runner))
    start = asyncio.create_task(engine.start())
    await runner.at_gate()
    stop = asyncio.create_task(engine.stop())
    with pytest.raises(EngineStopped):
        runner.open_gate()
        await start
    await stop
    assert runner.closed and not engine.ready


async def test_stopping_what_was_never_started() -> None:
    engine = Engine(fake_model())
    await engine.stop()
    await engine.stop()
    assert not engine.wedged
