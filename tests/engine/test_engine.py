"""Requests through the engine: events, joins and leaves, seeds, bounds, timing, idleness."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from chairlift.engine.engine import Engine, EngineConfig, RequestTiming
from chairlift.engine.errors import (
    ContextLengthExceeded,
    EngineStopped,
    InvalidParameter,
    ModelUnavailable,
    QueueFull,
)
from chairlift.engine.events import Event, Finished, FinishReason, TextDelta, TokenLogprob, Usage
from chairlift.engine.plan import LoadedModel, RunnerStats
from chairlift.engine.request import Request
from tests.engine.driving import end, events, request, settled, solo, started, text, tokens
from tests.fake_tokenizer import EOS
from tests.fakes import FakeRunner, Fault, all_rows, answering, fake_model


class TestStart:
    async def test_a_token_is_decoded_before_it_is_ready(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            assert engine.ready and engine.info.name == "fake"
            assert [len(plan.decode) for plan in runner.plans][:2] == [0, 1]
            assert runner.threads == {"chairlift-mlx"}
            stats = engine.stats()
            assert (stats.generation_tokens, stats.finished) == (0, {}), "the self-test is no request"

    async def test_nothing_is_served_before(self) -> None:
        engine = Engine(fake_model())
        with pytest.raises(EngineStopped, match="still loading"):
            engine.submit(request())
        assert engine.stats().steps == 0
        await engine.stop()

    async def test_what_the_factory_refuses_with_is_raised(self) -> None:
        def factory() -> LoadedModel:
            raise ModelUnavailable("There is no such model.")

        engine = Engine(factory)
        with pytest.raises(ModelUnavailable, match="^There is no such model.$"):
            await engine.start()
        assert not engine.ready and not engine.wedged

    async def test_any_other_error_becomes_one_line(self) -> None:
        def factory() -> LoadedModel:
            raise ValueError("Unsupported.\nlayer 3\nlayer 4")

        with pytest.raises(ModelUnavailable, match=r"^The model could not be loaded: Unsupported\.$"):
            await Engine(factory).start()

    async def test_a_model_that_cannot_decode_is_not_ready(self) -> None:
        runner = FakeRunner(fault=lambda plan: Fault(fail=all_rows))
        engine = Engine(fake_model(runner))
        with pytest.raises(ModelUnavailable, match=r"cannot decode: The fake failed this row\."):
            await engine.start()
        assert not engine.ready and runner.closed

    async def test_a_context_of_two_tokens_is_enough(self) -> None:
        async with started(FakeRunner(), context_length=2) as engine:
            assert tokens(await events(engine.submit(request("x")))) == solo(request("x"), 1)


class TestAnswer:
    async def test_events_of_an_answer(self) -> None:
        async with started(FakeRunner(answering("hé!"))) as engine:
            found = await events(engine.submit(request(max_tokens=20)))
        assert found == [
            TextDelta((104,), "h"),
            TextDelta((0xC3,), ""),
            TextDelta((0xA9,), "é"),
            TextDelta((33,), "!"),
            TextDelta((EOS,), ""),
            Finished(FinishReason.STOP, Usage(6, 5), EOS),
        ]

    async def test_max_tokens(self) -> None:
        async with started(FakeRunner(answering("abcdef"))) as engine:
            found = await events(engine.submit(request(max_tokens=3)))
        assert text(found) == "abc"
        assert found[-1] == Finished(FinishReason.LENGTH, Usage(6, 3))

    async def test_an_answer_that_ends_on_its_last_token_stopped(self) -> None:
        async with started(FakeRunner(answering("ab"))) as engine:
            assert await end(engine.submit(request(max_tokens=3))) == Finished(
                FinishReason.STOP, Usage(6, 3), EOS
            )

    async def test_a_stop_string(self) -> None:
        async with started(FakeRunner(answering("one END two"))) as engine:
            found = await events(engine.submit(request(max_tokens=20, stop=("END",))))
        assert text(found) == "one "
        assert found[-1] == Finished(FinishReason.STOP, Usage(6, 7), "END")

    async def test_the_end_of_the_context(self) -> None:
        async with started(FakeRunner(), context_length=10) as engine:
            found = await events(engine.submit(request(max_tokens=None)))
            assert found[-1] == Finished(FinishReason.LENGTH, Usage(6, 4))
            found = await events(engine.submit(request(max_tokens=400)))
            assert found[-1] == Finished(FinishReason.LENGTH, Usage(6, 4))
            with pytest.raises(ContextLengthExceeded, match="11 tokens.* 10 tokens"):
                engine.submit(request("hello world"))

    async def test_a_token_the_model_does_not_have_is_refused(self) -> None:
        async with started(FakeRunner()) as engine:
            for token in (-1, 260):
                with pytest.raises(InvalidParameter, match=r"outside 0\.\.259"):
                    engine.submit(request([5, token]))
            for name, value in (
                ("logit_bias", {5: 1.0, 260: 1.0}),
                ("logit_bias", {2**40: 1.0}),
                ("allowed_token_ids", (260, 5)),
                ("stop_token_ids", (5, 260)),
            ):
                with pytest.raises(InvalidParameter, match=rf"{name} .*outside 0\.\.259"):
                    engine.submit(request(**{name: value}))

    async def test_logprobs_stand_beside_their_tokens(self) -> None:
        async with started(FakeRunner(answering("ab"))) as engine:
            found = await events(engine.submit(request(logprobs=2)))
        assert found[0] == TextDelta((97,), "a", (TokenLogprob(97, -0.5, ((97, -0.5), (98, -1.5))),))
        assert all(
            len(event.logprobs) == len(event.token_ids) for event in found if isinstance(event, TextDelta)
        )

    async def test_timing(self) -> None:
        async with started(FakeRunner()) as engine:
            handle = engine.submit(request())
            assert handle.timing.admitted is None
            await events(handle)
        timing = handle.timing
        times = [timing.queued, timing.admitted, timing.first_token, timing.last_token, timing.finished]
        assert None not in times and times == sorted(time for time in times if time is not None)


class TestBatch:
    async def test_answers_do_not_depend_on_who_comes_and_goes(self) -> None:
        """200 requests join at different steps, a third leaves early; each gets what it would get alone."""
        chance = random.Random(2)
        runner = FakeRunner()
        asked = [
            request(chance.randbytes(chance.choice([1, 5, 40, 300])), max_tokens=chance.randint(1, 30))
            for _ in range(200)
        ]

        async def ask(index: int, engine: Engine) -> None:
            handle, patience = engine.submit(asked[index]), 1000
            if index % 3 == 0:
                patience = chance.randint(0, 20)
            found: list[Event] = []
            async for event in handle:
                found.append(event)
                if len(tokens(found)) >= patience:
                    handle.cancel()
            expected = solo(asked[index], asked[index].sampling.max_tokens or 0)
            drawn = tokens(found)
            assert drawn == expected[: len(drawn)]
            if isinstance(found[-1], Finished) and found[-1].reason is FinishReason.LENGTH:
                assert drawn == expected

        async with started(runner, EngineConfig(max_num_seqs=7, max_num_batched_tokens=64)) as engine:
            for start in range(0, 200, 20):
                await asyncio.gather(*(ask(index, engine) for index in range(start, start + 20)))
            await settled(engine)
            assert runner.rows == {}
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.runner) == (0, 0, RunnerStats())
            assert sum(stats.finished.values()) == 200

    async def test_requests_share_steps(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            runner.close_gate()
            handles = [engine.submit(request(f"prompt {index}")) for index in range(5)]
            await runner.at_gate()
            runner.open_gate()
            await asyncio.gather(*(events(handle) for handle in handles))
            assert max(len(plan.decode) for plan in runner.plans) == 5

    async def test_a_row_that_stops_wastes_one_draw(self) -> None:
        runner = FakeRunner(answering("abc"))
        async with started(runner) as engine:
            before = runner.wasted
            await end(engine.submit(request(max_tokens=50)))
            await settled(engine)
            assert runner.wasted - before == engine.stats().wasted_tokens == 1
            await end(engine.submit(request(max_tokens=50, stop=("b",))))
            await settled(engine)
            assert runner.wasted - before == engine.stats().wasted_tokens == 2

    async def test_a_row_that_reaches_its_limit_wastes_none(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            await end(engine.submit(request(max_tokens=9)))
            await settled(engine)
            assert engine.stats().wasted_tokens == 0

    async def test_the_queue_is_bounded(self) -> None:
        runner = FakeRunner()
        async with started(runner, EngineConfig(max_num_seqs=1, max_waiting=2)) as engine:
            runner.close_gate()
            handles = [engine.submit(request()) for _ in range(3)]
            with pytest.raises(QueueFull, match="3 requests are waiting") as refused:
                engine.submit(request())
            assert 1 <= refused.value.retry_after <= 60
            runner.open_gate()
            await asyncio.gather(*(events(handle) for handle in handles))
            await end(engine.submit(request()))


class TestSeeds:
    async def test_the_same_seed_draws_the_same_alone_and_in_a_batch(self) -> None:
        asked = request(temperature=1, seed=-5, max_tokens=20)
        async with started(FakeRunner()) as engine:
            alone = tokens(await events(engine.submit(asked)))
            others = [engine.submit(request(f"other {index}", temperature=1)) for index in range(4)]
            shared = tokens(await events(engine.submit(asked)))
            await asyncio.gather(*(events(handle) for handle in others))
        assert alone == shared == solo(asked, 20, seed=2**64 - 5)

    async def test_a_request_without_one_gets_its_own(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            for _ in range(2):
                await end(engine.submit(request(temperature=1)))
        seeds = [new.seed for plan in runner.plans for new in plan.admit]
        assert len(set(seeds)) == 3 and all(0 <= seed < 2**64 for seed in seeds)


class TestLeaving:
    async def test_while_it_waits(self) -> None:
        runner = FakeRunner()
        async with started(runner, EngineConfig(max_num_seqs=1)) as engine:
            running = engine.submit(request())
            waiting = engine.submit(request())
            waiting.cancel()
            assert engine.stats().waiting == 1
            assert await end(waiting) == Finished(FinishReason.ABORT, Usage(6, 0))
            assert isinstance(await end(running), Finished)
            assert len([new for plan in runner.plans for new in plan.admit]) == 2

    async def test_in_mid_prefill(self) -> None:
        runner = FakeRunner()
        async with started(runner, EngineConfig(max_num_batched_tokens=32)) as engine:
            runner.close_gate()
            handle = engine.submit(request("x" * 200))
            await runner.at_gate()
            await runner.let_through()
            handle.cancel()
            await runner.let_through()
            assert len(runner.rows) == 1, "the step under way when it left had been planned before"
            runner.open_gate()
            await settled(engine)
            assert runner.rows == {} and runner.plans[-1].release == (2,)
            assert await end(handle) == Finished(FinishReason.ABORT, Usage(200, 0))

    async def test_in_mid_decode(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            runner.close_gate()
            handle = engine.submit(request(max_tokens=1000))
            await runner.at_gate()
            await runner.let_through(4)
            handle.cancel()
            planned = len(runner.plans) + 1
            runner.open_gate()
            await settled(engine)
            assert len(runner.plans) == planned + 1 and runner.plans[planned].release == (2,)
            found = await events(handle)
            assert tokens(found) == solo(request(), 3)
            assert found[-1] == Finished(FinishReason.ABORT, Usage(6, 3))

    async def test_a_reader_that_has_all_it_wants(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            runner.close_gate()
            handle = engine.submit(request(max_tokens=1000))
            await runner.at_gate()
            await runner.let_through(4)
            handle.finish()
            runner.open_gate()
            await settled(engine)
            assert await end(handle) == Finished(FinishReason.STOP, Usage(6, 3))
            handle.finish()
            assert engine.stats().finished == {FinishReason.STOP: 1}

    async def test_cancelling_what_has_ended_changes_nothing(self) -> None:
        async with started(FakeRunner()) as engine:
            handle = engine.submit(request(max_tokens=1))
            await settled(engine)
            handle.cancel()
            handle.cancel()
            assert await end(handle) == Finished(FinishReason.LENGTH, Usage(6, 1))
            assert engine.stats().finished == {FinishReason.LENGTH: 1}

    async def test_closing_and_leaving_a_with_block(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            runner.close_gate()
            async with engine.submit(request()) as first:
                second = engine.submit(request())
            await second.aclose()
            runner.open_gate()
            for handle in (first, second):
                assert await end(handle) == Finished(FinishReason.ABORT, Usage(6, 0))

    async def test_dropping_the_handle(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            runner.close_gate()
            handle = engine.submit(request(max_tokens=1000))
            await runner.at_gate()
            await runner.let_through(3)
            del handle
            gc.collect()
            runner.open_gate()
            await settled(engine)
            assert engine.stats().finished == {FinishReason.ABORT: 1}
            assert runner.rows == {}

    async def test_a_reader_that_is_cancelled_can_be_followed_by_another(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            runner.close_gate()
            handle = engine.submit(request())
            reader = asyncio.create_task(anext(handle))
            await runner.at_gate()
            reader.cancel()
            runner.open_gate()
            assert tokens(await events(handle)) == solo(request(), 8)


class TestSlowReader:
    async def test_unread_deltas_are_merged(self) -> None:
        runner = FakeRunner(answering("abcdefgh"))
        async with started(runner) as engine:
            handle = engine.submit(request(max_tokens=8, logprobs=0))
            await settled(engine)
            found = await events(handle)
        logprobs = tuple(TokenLogprob(token, -0.5) for token in b"abcdefgh")
        assert found == [
            TextDelta(tuple(b"abcdefgh"), "abcdefgh", logprobs),
            Finished(FinishReason.LENGTH, Usage(6, 8)),
        ]

    async def test_merged_deltas_can_be_told_apart(self) -> None:
        runner = FakeRunner(answering("aé"))
        async with started(runner) as engine:
            handle = engine.submit(request(max_tokens=3))
            await settled(engine)
            merged = (await events(handle))[0]
        assert isinstance(merged, TextDelta)
        assert (merged.text, merged.lengths) == ("aé", (1, 0, 1))


class TestIdleness:
    async def test_an_idle_engine_does_no_steps(self) -> None:
        runner = FakeRunner()
        async with started(runner) as engine:
            await end(engine.submit(request()))
            await settled(engine)
            steps, turns = len(runner.plans), 200
            assert engine.stats().steps == steps and runner.rows == {}
            for _ in range(turns):
                await asyncio.sleep(0)
            assert len(runner.plans) == steps
            assert engine._loop_task is not None and not engine._loop_task.done()
            await end(engine.submit(request()))
            assert len(runner.plans) > steps


class Watcher:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.steps: list[tuple[int, int]] = []

    def on_first_token(self, request: Request, timing: RequestTiming, cached_tokens: int) -> None:
        assert timing.first_token is not None and timing.finished is None
        self.calls.append(("first", request.prompt_token_ids, cached_tokens))

    def on_token_interval(self, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append(("interval",))

    def on_finished(
        self, request: Request, timing: RequestTiming, usage: Usage, reason: FinishReason
    ) -> None:
        assert timing.finished is not None
        self.calls.append(("finished", usage, reason))

    def on_step(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        assert seconds >= 0
        self.steps.append((prompt_tokens, decoding))


class Stumbling(Watcher):
    def on_first_token(self, request: Request, timing: RequestTiming, cached_tokens: int) -> None:
        raise RuntimeError("The observer is broken.")

    def on_finished(
        self, request: Request, timing: RequestTiming, usage: Usage, reason: FinishReason
    ) -> None:
        raise RuntimeError("The observer is broken.")


class TestWatching:
    async def test_an_observer_sees_tokens_and_ends(self) -> None:
        watcher = Watcher()
        async with started(FakeRunner(), observer=watcher) as engine:
            watcher.steps.clear()  # those of the self-test
            await end(engine.submit(request("ab", max_tokens=3)))
        assert watcher.steps == [(2, 0), (0, 1), (0, 1)]
        assert watcher.calls == [
            ("first", (97, 98), 0),
            ("interval",),
            ("interval",),
            ("finished", Usage(2, 3), FinishReason.LENGTH),
        ]

    async def test_an_observer_that_raises_harms_nobody(self) -> None:
        async with started(FakeRunner(), observer=Stumbling()) as engine:
            assert await end(engine.submit(request())) == Finished(FinishReason.LENGTH, Usage(6, 8))

    async def test_stats(self) -> None:
        runner = FakeRunner()
        async with started(runner, EngineConfig(max_num_seqs=1)) as engine:
            runner.close_gate()
            handles = [engine.submit(request()) for _ in range(3)]
            await runner.at_gate()
            await runner.let_through()
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.busy) == (1, 2, True)
            assert stats.stalled_s > 0 and stats.last_step_age_s is not None
            runner.open_gate()
            await asyncio.gather(*(events(handle) for handle in handles))
            await settled(engine)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.busy, stats.stalled_s) == (0, 0, False, 0.0)
            assert (stats.prompt_tokens, stats.generation_tokens) == (18, 24)
            assert stats.finished == {FinishReason.LENGTH: 3}


class TestConfig:
    @pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_waiting"])
    def test_a_bound_that_serves_nothing_is_refused(self, field: str) -> None:
        with pytest.raises(InvalidParameter, match=field):
            EngineConfig(**{field: -1})
