"""When tokens are told: at once where the answer may end with them, else while the next step runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.engine.answers import Answers
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineError
from chairlift.engine.events import Failed, TextDelta
from chairlift.engine.plan import Sample, StepPlan
from chairlift.engine.row import RequestTiming, Row
from chairlift.engine.text import AnswerText
from chairlift.engine.thread import on_loop
from tests.engine.driving import events, request, settled, started, text
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, answering


class Watching(FakeTokenizer):
    """Notes, for each text made of an answer, whether a step was on the thread then."""

    engine: Engine | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stepping: list[tuple[str, bool]] = []

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        made = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        if self.engine is not None:
            self.stepping.append((made[-1:], self.engine.stats().stalled_s > 0))
        return made


def test_text_is_made_while_the_next_step_runs() -> None:
    async def main() -> None:
        tokenizer, runner = Watching(), FakeRunner(answering("abcdef"))
        async with started(runner, tokenizer=tokenizer) as engine:
            tokenizer.engine = engine
            found = await events(engine.submit(request(max_tokens=4)))
        assert text(found) == "abcd"
        # The last token ends the answer, which the next plan has to know. While it is drawn nothing is built.
        assert dict(tokenizer.stepping) == {"a": True, "b": True, "c": False, "d": False}

    asyncio.run(main())


def test_a_text_that_may_end_the_answer_is_made_before_the_next_plan() -> None:
    async def main() -> None:
        tokenizer, runner = Watching(), FakeRunner(answering("abcdef"))
        async with started(runner, tokenizer=tokenizer) as engine:
            tokenizer.engine = engine
            found = await events(engine.submit(request(max_tokens=8, stop=("cd",))))
            await settled(engine)
            wasted = engine.stats().wasted_tokens
        assert text(found) == "ab"
        assert not any(stepping for _, stepping in tokenizer.stepping)
        assert wasted == 1  # the look-ahead's

    asyncio.run(main())


def test_a_token_does_not_wait_for_a_step_that_waits_itself() -> None:
    """Here for the last draw, which is in flight."""

    async def main() -> None:
        runner = FakeRunner(answering("abcdef"))
        async with started(runner) as engine:
            runner.close_gate()
            handle = engine.submit(request(max_tokens=2))
            await runner.at_gate()
            await runner.let_through(2)
            told = asyncio.ensure_future(anext(handle))
            await asyncio.sleep(0)
            assert told.done() and text([await told]) == "a"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("parts", "at_once"),
    [
        ({"decode": (1,)}, False),
        ({"decode": (1,), "settle": True}, True),
        ({"encode": (1,)}, True),
        ({"release": (1,)}, True),
    ],
)
async def test_what_no_plan_has_built_soon_is_told_before(parts: dict[str, Any], at_once: bool) -> None:
    answers, asked = Answers(None, lambda row: None), request(max_tokens=6)
    row = Row(asked, 0, 6, 0, RequestTiming(0.0))
    box = answers.begin(row, AnswerText(FakeTokenizer(), asked.sampling), observed=False)
    row.output.append(ord("x"))
    answers.take(row, Sample(ord("x")), 1.0)
    told = asyncio.ensure_future(box.get())
    answers.planned(StepPlan(1, **parts))
    await asyncio.sleep(0)
    assert told.done() == at_once
    told.cancel()


def test_what_ends_from_outside_has_told_all_that_was_drawn() -> None:
    answers = Answers(None, lambda row: None)
    asked = request(max_tokens=6)
    rows = [Row(asked, 0, 6, arrival, RequestTiming(0.0)) for arrival in range(2)]
    boxes = [answers.begin(row, AnswerText(FakeTokenizer(), asked.sampling), observed=False) for row in rows]
    for row in rows:
        row.output.append(ord("x"))
        answers.take(row, Sample(ord("x")), 1.0)
    answers.fail(rows[0], EngineError("Over."))

    async def read() -> None:
        first, second = boxes
        delta, over = await first.get(), await first.get()
        assert isinstance(delta, TextDelta) and delta.text == "x"
        assert isinstance(over, Failed) and over.usage.completion_tokens == 1
        waits = asyncio.ensure_future(second.get())
        await asyncio.sleep(0)
        assert not waits.done()
        answers.tell()
        told = await waits
        assert isinstance(told, TextDelta) and told.text == "x"

    asyncio.run(read())


def test_another_thread_has_the_loop_call() -> None:
    async def main() -> str:
        called = asyncio.get_running_loop().create_future()
        soon = on_loop(lambda: called.set_result(threading.current_thread().name))
        await asyncio.to_thread(soon)
        return str(await called)

    assert asyncio.run(main()) == threading.current_thread().name


def test_a_loop_that_is_closed_calls_nothing() -> None:
    async def main() -> Callable[[], None]:
        return on_loop(lambda: None)

    asyncio.run(main())()
