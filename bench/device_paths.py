"""The ways to decode that bench/device.py times: the bare model step, our runner and engine, and mlx-lm's
BatchGenerator. Each drives the same prompts (token ids) and answer lengths, greedy unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from device_work import WARM_STEPS, Work
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import EngineError
from chairlift.engine.events import Failed, TextDelta
from chairlift.engine.plan import LoadedModel, ModelInfo, NewRow, Runner, RunnerStats, Span, StepPlan
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.runner import MlxRunner
from chairlift.engine.scheduler import Scheduler

CONTEXT = 131072


class Deadline:
    """A loop stops at it, and its figures are those of what was done."""

    def __init__(self, seconds: float) -> None:
        self._at = time.perf_counter() + seconds

    @property
    def passed(self) -> bool:
        return time.perf_counter() > self._at


@dataclass
class Steps:
    """Timed steps of one path."""

    seconds: list[float] = field(default_factory=list)
    """Of each step in which all rows decode and nothing prefills."""
    drawn: int = 0
    """Tokens of the whole run."""
    wall: float = 0.0
    """Seconds of the whole run, prompts included."""
    cut: bool = False
    """The deadline passed before the work was done."""
    at_full: RunnerStats | None = None
    """Memory while all rows decode (our runner only)."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row at that time."""
    peak_rows: int = 0

    def steady_tokens_per_s(self, batch: int) -> float | None:
        timed = self.seconds[WARM_STEPS:]
        return batch * len(timed) / sum(timed) if timed else None

    @property
    def step_ms(self) -> float | None:
        timed = self.seconds[WARM_STEPS:]
        return 1000 * median(timed) if timed else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.drawn / self.wall if self.wall else None


# The bare model step


def equal_caches(model: nn.Module, rows: int, length: int, *, masked: bool) -> list[Any]:
    """Upstream caches that hold `length` tokens of each row. `masked`: mlx-lm's batch cache, whose mask is an
    array; else its plain cache with a batch axis, which one new token needs no mask for."""
    caches: list[Any] = make_prompt_cache(model)
    if masked:
        caches = [BatchKVCache([0] * rows) if isinstance(cache, KVCache) else cache for cache in caches]
    chunk = max(1, 16384 // rows)
    for start in range(0, length, chunk):
        tokens = mx.ones((rows, min(chunk, length - start)), dtype=mx.int32)
        model(tokens, cache=caches)  # logits are never asked for, so never computed
        mx.eval([cache.state for cache in caches])
    return caches


def padded_caches(model: nn.Module, lengths: Sequence[int], dtype: mx.Dtype, room: int) -> list[Any]:
    """mlx-lm's left-padded batch cache for rows of these lengths, filled at random, with room for `room` more
    tokens so that nothing grows while it is timed."""
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    caches = equal_caches(model, len(lengths), 1, masked=True)
    for cache in caches:
        if isinstance(cache, BatchKVCache):
            rows, heads, _, key_size = cache.keys.shape
            value_size = cache.values.shape[-1]
            width = longest + room
            cache.keys = mx.random.normal((rows, heads, width, key_size), dtype=dtype)
            cache.values = mx.random.normal((rows, heads, width, value_size), dtype=dtype)
            cache.left_padding = mx.array(padding)
            cache.offset = mx.array(list(lengths))
            cache._idx = longest
            mx.eval(cache.keys, cache.values, cache.left_padding, cache.offset)
    return caches


def filled_rows(model: nn.Module, lengths: Sequence[int], dtype: mx.Dtype) -> list[list[Any]]:
    """Caches of one request each that hold so many tokens, filled at random: what a prefill would leave."""
    one: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.ones((1, 1), dtype=mx.int32), cache=one))
    rows = []
    for length in lengths:
        caches: list[Any] = make_prompt_cache(model)
        for cache, like in zip(caches, one, strict=True):
            if isinstance(cache, KVCache):
                shapes = [(1, a.shape[1], length, a.shape[3]) for a in (like.keys, like.values)]
                cache.keys, cache.values = (mx.random.normal(shape, dtype=dtype) for shape in shapes)
                cache.offset = length
            else:
                cache.cache = [mx.array(array) for array in like.cache]
        mx.eval([cache.state for cache in caches])
        rows.append(caches)
    return rows


def bare(model: nn.Module, caches: list[Any], rows: int, steps: int, deadline: Deadline) -> Steps:
    """Forward, argmax, and the next step launched before the host reads this one's tokens."""
    timed = Steps()
    tokens = mx.ones((rows,), dtype=mx.int32)
    mx.eval(tokens)
    before: mx.array | None = None
    start = last = time.perf_counter()
    for _ in range(steps + WARM_STEPS):
        tokens = mx.argmax(model(tokens[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(tokens)
        if before is not None:
            before.tolist()
            now = time.perf_counter()
            timed.seconds.append(now - last)
            last = now
            timed.drawn += rows
        before = tokens
        if deadline.passed:
            timed.cut = True
            break
    timed.wall = last - start
    return timed


# Ours


def requests(work: Work, sampled: bool) -> list[Request]:
    return [
        Request(
            f"r{index}",
            tuple(prompt),
            SamplingParams(
                max_tokens=answer,
                temperature=0.8 if sampled else 0.0,
                top_p=0.95 if sampled else 1.0,
                seed=index,
                ignore_eos=True,
            ),
        )
        for index, (prompt, answer) in enumerate(zip(work.prompts, work.answers, strict=True))
    ]


def ours(
    runner: Runner, work: Work, rows: int, budget: int, deadline: Deadline, *, sampled: bool = False
) -> Steps:
    """Scheduler and runner, stepped on this thread as the engine does it, without event loop and text."""
    scheduler = Scheduler(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_waiting=len(work.prompts),
        context_length=CONTEXT,
        clock=time.perf_counter,
    )
    for index, request in enumerate(requests(work, sampled)):
        scheduler.add(request, seed=index)
    timed = Steps()
    start = last = time.perf_counter()
    while scheduler.busy:
        plan = scheduler.schedule()
        committed = scheduler.commit(runner.step(plan))
        if committed.failed:
            raise RuntimeError(f"a row failed: {committed.failed[0][1]}")
        timed.drawn += len(committed.drawn)
        for row, _ in committed.drawn:
            if row.drawn >= row.limit:
                scheduler.finish(row)
        now = time.perf_counter()
        timed.peak_rows = max(timed.peak_rows, len(plan.decode))
        if len(plan.decode) == rows and not plan.prefill:
            timed.seconds.append(now - last)
            if len(timed.seconds) == 2 * WARM_STEPS:
                timed.at_full = runner.stats()
                timed.lengths = [len(row.request.prompt_token_ids) + row.launched for row in scheduler.rows]
                now = time.perf_counter()
        last = now
        if deadline.passed and not timed.cut:
            timed.cut = True
            for row in scheduler.rows:
                scheduler.finish(row)
    timed.wall = time.perf_counter() - start
    if scheduler.losses:
        raise RuntimeError(f"{scheduler.losses} rows lost their state on the way")
    return timed


class LetterTokenizer:
    """A letter a token: the script has no vocabulary, and the engine makes text of every token."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids: frozenset[int] = frozenset()
        self.has_chat_template = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % self.vocab_size for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        raise NotImplementedError


@dataclass
class _Answer:
    times: list[float] = field(default_factory=list)
    """When each token's event was read."""


async def engine(
    make_runner: Callable[[], Runner], vocab_size: int, work: Work, rows: int, budget: int, deadline: Deadline
) -> Steps:
    """The whole engine: event loop, MLX thread, text, one reader a request."""
    info = ModelInfo("random", CONTEXT, 0)
    running = Engine(
        lambda: LoadedModel(info, LetterTokenizer(vocab_size), make_runner()),
        EngineConfig(rows, budget, len(work.prompts)),
    )

    async def read(request: Request) -> _Answer:
        answer = _Answer()
        async for event in running.submit(request):
            if isinstance(event, TextDelta):
                answer.times += [time.perf_counter()] * len(event.token_ids)
            elif isinstance(event, Failed):
                raise event.error
        return answer

    await running.start()
    try:
        start = time.perf_counter()
        readers = [asyncio.create_task(read(request)) for request in requests(work, sampled=False)]
        stopper = asyncio.create_task(_stop_at(deadline, readers))
        done = await asyncio.gather(*readers, return_exceptions=True)
        stopper.cancel()
    finally:
        await running.stop()
    errors = [outcome for outcome in done if isinstance(outcome, EngineError)]
    if errors:
        raise errors[0]
    answers = [outcome for outcome in done if isinstance(outcome, _Answer) and outcome.times]
    return _engine_steps(answers, rows, start, cut=len(answers) < len(work.prompts))


async def _stop_at(deadline: Deadline, readers: Sequence[asyncio.Task[_Answer]]) -> None:
    while not deadline.passed:
        await asyncio.sleep(1.0)
    for reader in readers:
        reader.cancel()


def _engine_steps(answers: Sequence[_Answer], rows: int, start: float, *, cut: bool) -> Steps:
    timed = Steps(cut=cut, drawn=sum(len(answer.times) for answer in answers))
    if not answers:
        return timed
    timed.wall = max(answer.times[-1] for answer in answers) - start
    # Between the last row's first token and the first row's last, all rows decode.
    full = (max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers))
    if len(answers) == rows and full[1] > full[0]:
        one = [at for at in answers[0].times if full[0] <= at <= full[1]]
        timed.seconds = [later - sooner for sooner, later in zip(one, one[1:], strict=False)]
    return timed


def ours_filled(
    runner: MlxRunner, caches: Sequence[list[Any]], lengths: Sequence[int], steps: int, deadline: Deadline
) -> Steps:
    """Our runner's decode step alone, over rows that begin with these caches."""
    rows = range(1, len(lengths) + 1)
    runner.step(
        StepPlan(1, admit=tuple(NewRow(row, SamplingParams(temperature=0), seed=row) for row in rows))
    )
    for row, filled, length in zip(rows, caches, lengths, strict=True):
        # There is no way in but through prompts; a prefill of these would measure something else.
        resident = runner._residents.rows[row]
        resident.caches, resident.held = filled, length
    first = tuple(Span(row, length, (1,), last=True) for row, length in zip(rows, lengths, strict=True))
    runner.step(StepPlan(2, prefill=first))
    timed = Steps(lengths=list(lengths))
    start = last = time.perf_counter()
    for number in range(3, steps + WARM_STEPS + 3):
        runner.step(StepPlan(number, decode=tuple(rows)))
        now = time.perf_counter()
        timed.seconds.append(now - last)
        timed.drawn += len(lengths)
        if number == 3 + WARM_STEPS:
            timed.at_full = runner.stats()
            now = time.perf_counter()
        last = now
        if deadline.passed:
            timed.cut = True
            break
    timed.wall = last - start
    runner.step(StepPlan(number + 1, release=tuple(rows)))
    return timed


# mlx-lm's


def batch_generator(
    model: nn.Module,
    work: Work,
    rows: int,
    deadline: Deadline,
    caches: Sequence[list[Any]] | None = None,
) -> Steps:
    """`caches`: what the rows hold before their prompts."""
    generator = BatchGenerator(
        model,
        completion_batch_size=rows,
        prefill_batch_size=min(8, rows),
        sampler=partial(mx.argmax, axis=-1),
    )
    timed = Steps()
    try:
        left = set(generator.insert(work.prompts, work.answers, caches=caches))
        start = last = time.perf_counter()
        while left and not timed.cut:
            prompts, drawn = generator.next()
            now = time.perf_counter()
            timed.drawn += len(drawn)
            if len(drawn) == rows and not prompts:
                timed.seconds.append(now - last)
            left -= {response.uid for response in drawn if response.finish_reason is not None}
            last = now
            timed.cut = deadline.passed
        timed.wall = last - start
    finally:
        generator.close()
    return timed
