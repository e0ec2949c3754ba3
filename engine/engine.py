"""The engine: one loop that plans, runs and commits steps, and says to each request what became of it.

Everything here runs on the event loop that `start` was called on, except the model's factory and the runner,
which live on the MLX thread. When the tokens of step n reach the host, step n + 1 is already on the device,
so text and events of step n are made while the device computes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from chairlift.engine.answers import Answers
from chairlift.engine.config import EngineConfig, EngineObserver, EngineStats
from chairlift.engine.constraints import Compiler
from chairlift.engine.disk import DiskTraffic, open_disk, prefixes_of, require_disk
from chairlift.engine.errors import (
    SHUTTING_DOWN,
    EngineError,
    EngineStopped,
    InvalidParameter,
    ModelUnavailable,
    StepFailed,
)
from chairlift.engine.events import Failed
from chairlift.engine.handle import RequestHandle
from chairlift.engine.kept import CacheCleared, KeptPrefixes, with_prefixes
from chairlift.engine.media import MediaProcessor
from chairlift.engine.memory.budget import Budget, Reservation
from chairlift.engine.memory.guard import MemoryGuard
from chairlift.engine.pace import Pace
from chairlift.engine.plan import (
    LoadedModel,
    ModelInfo,
    Runner,
    StepPlan,
    StepResult,
    Tokenizer,
)
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.request import MAX_SEED, Request, SamplingParams
from chairlift.engine.row import RequestTiming, Row
from chairlift.engine.scheduler import Scheduler
from chairlift.engine.statistics import StepStatistics, stats_of
from chairlift.engine.text import AnswerText
from chairlift.engine.thread import MLXThread, on_loop

log = logging.getLogger(__name__)

LOAD_PATIENCE = 1.0
"""Seconds that stopping waits for a model that is still loading."""

__all__ = ["Engine", "EngineConfig", "EngineObserver", "EngineStats", "RequestHandle", "RequestTiming"]


class Engine:
    """Serves requests with one model.

    Args:
        runner_factory: called on the MLX thread; loads the model. What it raises, `start` raises.
        config: bounds.
        observer: told about first tokens, intervals and ends.
        budget: of memory, that several engines share; None: one of its own, as `config` says.
        weights: of that budget, what was reserved for the load.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    processor: MediaProcessor | None
    """None for a model that takes text only."""
    constraints: Compiler | None
    """Compiles what answers must follow."""

    def __init__(
        self,
        runner_factory: Callable[[], LoadedModel],
        config: EngineConfig | None = None,
        *,
        observer: EngineObserver | None = None,
        budget: Budget | None = None,
        weights: Reservation | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.ready = False
        """The model is loaded and has decoded a token; false again once stopping."""
        self.draining = False
        self.wedged = False
        """`stop` gave the MLX thread up: a call on it never came back."""
        self._factory = runner_factory
        self._budget, self._weights = budget, weights
        self._memory = MemoryGuard()
        self._thread: MLXThread | None = None
        self._runner: Runner
        self._scheduler: Scheduler
        self._pace: Pace
        self._disk: DiskTraffic | None = None
        self._kept: KeptPrefixes
        self._answers = Answers(observer, self._finish)
        self._statistics = StepStatistics()
        self._loading: asyncio.Future[LoadedModel] | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._stop_task: asyncio.Task[None] | None = None
        self._drain_until = float("inf")
        self._drain_news = asyncio.Event()
        self._why = SHUTTING_DOWN

    # -- life

    async def start(self) -> None:
        """Load the model and decode one real token with it.

        Raises:
            EngineError: the model could not be loaded or stepped, in one line; `ModelUnavailable` unless the
                factory raised another `EngineError` itself.
        """
        if self._thread is not None or self.draining:
            raise EngineStopped("The engine was started before.")
        self._thread = MLXThread()
        try:
            require_disk(self.config)
            await self._load(self._thread)
            await self._test()
        except BaseException:
            await self.stop()
            raise
        self.ready = not self.draining

    async def _load(self, thread: MLXThread) -> None:
        self._loading = thread.run(self._factory)
        try:
            loaded = await self._loading
        except asyncio.CancelledError:
            if self.draining and (task := asyncio.current_task()) and not task.cancelling():
                raise EngineStopped(self._why) from None
            raise
        except EngineError:
            raise
        except Exception as error:
            raise ModelUnavailable(f"The model could not be loaded: {_line(error)}") from None
        self.info, self.tokenizer, self._runner = loaded.info, loaded.tokenizer, loaded.runner
        self.processor, self.constraints = loaded.processor, loaded.constraints
        budget = self.config.max_num_batched_tokens or self.info.step_tokens
        self.config = replace(with_prefixes(loaded, self.config), max_num_batched_tokens=budget)
        kept = self.config.prefix_cache_bytes
        self._pace = Pace.of(self.config.max_step_ms, budget)
        index = PrefixIndex(loaded.prefix, kept) if loaded.prefix is not None and kept else None
        self._memory = MemoryGuard.of(
            *(loaded, self.config, index), budget=self._budget, weights=self._weights, wake=self._wake.set
        )
        await thread.run(self._memory.bound)
        self._runner.when_built(on_loop(self._answers.tell))
        disk = await open_disk(loaded, self.config)
        prefixes = prefixes_of(index, disk, self._pace.rate)
        self._scheduler = Scheduler(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=budget,
            max_waiting=self.config.max_waiting,
            context_length=self.info.context_length,
            clock=time.monotonic,
            prefixes=prefixes,
            pace=self._pace.tokens,
            memory=self._memory.rows,
        )
        if disk is not None:
            self._disk = DiskTraffic(disk, prefixes, self._wake.set)
            await thread.run(partial(self._runner.spill, disk))
        self._kept = KeptPrefixes(self._scheduler, self._disk, self.submit, self._wake.set)
        self._loop_task = asyncio.create_task(self._run(), name="chairlift engine")

    async def _test(self) -> None:
        prompt = tuple(self.tokenizer.encode("Hello")[: max(1, self.info.context_length - 2)]) or (0,)
        sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        async with self._submit(Request("self-test", prompt, sampling), observed=False) as handle:
            async for event in handle:
                if isinstance(event, Failed):
                    if isinstance(event.error, EngineStopped):
                        raise event.error
                    raise ModelUnavailable(f"The model cannot decode: {event.error.message}")

    async def stop(self, drain_timeout: float = 0.0, *, why: str = SHUTTING_DOWN) -> None:
        """Admit nothing more, let running rows finish for so many seconds, end the rest, close the runner.

        Requests that are still waiting end at once; what ends here ends with `Failed(EngineStopped(why))`.
        May be called again at any time: the shorter time-out counts. Never waits much longer than that and a
        few times `EngineConfig.close_timeout`: a thread that does not come back is given up: `wedged`.
        """
        self.ready = False
        self.draining, self._why = True, why
        self._drain_until = min(self._drain_until, time.monotonic() + drain_timeout)
        self._drain_news.set()
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._shut_down(), name="chairlift engine stop")
        await asyncio.shield(self._stop_task)

    async def _shut_down(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        for row in [row for row in self._answers.rows if row.timing.admitted is None]:
            self._answers.fail(row, EngineStopped(self._why))
        while self._answers.rows and (left := self._drain_until - time.monotonic()) > 0:
            self._drain_news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drain_news.wait(), left)
        for row in self._answers.rows:
            self._answers.fail(row, EngineStopped(self._why))
        self._closing = True
        self._wake.set()
        if self._loop_task is not None:
            self._kept.carried_out()
            await self._in_time(self._loop_task)
        if self._disk is not None:
            await asyncio.to_thread(self._disk.disk.close, 0.0 if self.wedged else self.config.close_timeout)
        if self._thread is not None:
            await self._close(self._thread)
        if self.wedged:
            self._memory.give_up()
            return
        self._memory.close()
        if self._weights is not None:
            self._weights.release()

    async def _close(self, thread: MLXThread) -> None:
        loaded = self._loop_task is not None
        if loaded and not self.wedged:
            await self._in_time(thread.run(self._runner.close))
        # A model that is still loading holds nothing worth waiting for.
        patience = 0.0 if self.wedged else self.config.close_timeout if loaded else LOAD_PATIENCE
        if not await thread.end(patience):
            self.wedged = True
            log.error("The MLX thread does not come back from a call; it is given up.")

    async def _in_time(self, work: asyncio.Future[None]) -> None:
        """Wait for it as long as the configuration allows; after that the thread counts as wedged."""
        done, _ = await asyncio.wait({work}, timeout=self.config.close_timeout)
        if not done:
            self.wedged = True
            work.cancel()
            await asyncio.wait({work})
        elif not work.cancelled() and (error := work.exception()) is not None:
            log.error("The engine did not close cleanly: %s", _line(error))

    # -- requests

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request; call it on the event loop. `max_tokens` is clamped to the room in the context.

        Raises:
            EngineStopped: not started, draining or stopped.
            InvalidParameter: a token id the model does not have.
            ContextLengthExceeded: the prompt fills the context.
            QueueFull: come back later.
        """
        self._require_ready()
        self.check(request)
        return self._submit(request, observed=True)

    def check(self, request: Request) -> None:
        """What `submit` checks of the request itself, without queueing it; from any thread, after `start`.

        Raises:
            InvalidParameter: a token id the model does not have.
            ContextLengthExceeded: the prompt fills the context.
        """
        self._scheduler.limit(request)  # first, so that no more tokens are looked at than the context holds
        tokens, known = request.prompt_token_ids, self.tokenizer.vocab_size
        if min(tokens) < 0 or max(tokens) >= known:
            raise InvalidParameter("prompt", f"The prompt holds a token id outside 0..{known - 1}.")
        sampling = request.sampling
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            if max(getattr(sampling, name) or (0,)) >= known:
                raise InvalidParameter(name, f"{name} holds a token id outside 0..{known - 1}.")

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and answer that context and memory let a request have; after `start`."""
        return self._memory.rows.longest(self.info.context_length)

    async def warm(self, tokens: Sequence[int], salt: str = "") -> int:
        """Compute a prompt and keep it, so that later requests of this salt begin behind it: it does not go
        for room. Returns the tokens kept.

        Raises:
            InvalidParameter: prefixes are not kept, or there is no room for this one.
            EngineError: what `submit` raises, or what the request failed with.
        """
        self._require_ready()
        return await self._kept.warm(tokens, salt)

    async def clear_cache(self, *, disk: bool = False) -> CacheCleared:
        """Keep no prefixes of earlier requests, and give their memory back to the system. What runs goes on;
        rows that run leave nothing of what they have computed so far.

        Args:
            disk: delete the model's files, too.

        Raises:
            EngineStopped: not started, draining or stopped.
        """
        self._require_ready()
        return await self._kept.clear(disk=disk)

    def _require_ready(self) -> None:
        if not self.ready:
            raise EngineStopped(self._why if self.draining else "The model is still loading.")

    def _submit(self, request: Request, *, observed: bool) -> RequestHandle:
        given = request.sampling.seed
        row = self._scheduler.add(request, secrets.randbits(64) if given is None else given & MAX_SEED)
        text = AnswerText(self.tokenizer, request.sampling, request.visible_token_ids)
        mailbox = self._answers.begin(row, text, observed=observed)
        self._wake.set()
        return RequestHandle(request, row.timing, mailbox, partial(self._answers.end, row))

    def _finish(self, row: Row) -> None:
        """What is due beside the event when a row ends."""
        self._drain_news.set()
        self._wake.set()
        self._scheduler.finish(row)

    # -- the loop

    async def _run(self) -> None:
        while not self._closing or self._scheduler.busy:
            self._serve_disk()
            pause = self._scheduler.pause
            if pause is None or pause > 0:
                self._answers.tell()
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                continue
            try:
                plan = self._scheduler.schedule()
                self._serve_disk()
                try:
                    result = await self._step(plan)
                except Exception as error:
                    self._answers.recover(error, self._scheduler.abandon())
                else:
                    self._commit(result)
                finally:
                    self._kept.carried_out(plan)
            except Exception as error:  # a defect of ours: nobody may hang on it
                self._answers.recover(error, self._answers.rows)
                await asyncio.sleep(0)

    def _serve_disk(self) -> None:
        if self._disk is not None:
            try:
                self._disk.go_on()
            except Exception:  # a defect of ours: rows that wait for it do so for a bounded time
                log.exception("The disk could not be asked")

    async def _step(self, plan: StepPlan) -> StepResult | None:
        assert self._thread is not None
        self._answers.planned(plan)
        begun = self._statistics.begin()
        try:
            result = await self._thread.run(partial(self._step_on_thread, plan))
            self._answers.tell()  # where none was built
            spent = time.monotonic() - begun
            self._pace.observe(plan, spent)
            self._answers.stepped(plan, spent)
            self._memory.observe(self._statistics.runner)
            return result
        finally:
            self._statistics.end()

    def _step_on_thread(self, plan: StepPlan) -> StepResult | None:
        result = self._runner.step(plan)
        self._statistics.read(self._runner, idle=plan.idle)
        return result

    def _commit(self, result: StepResult | None) -> None:
        committed, now = self._scheduler.commit(result), time.monotonic()
        for row, message in committed.failed:
            self._answers.fail(row, StepFailed(message))
        for row, sample in committed.drawn:
            self._answers.take(row, sample, now)

    def stats(self) -> EngineStats:
        """Plain numbers; before `start` has loaded the model all of them are zero."""
        scheduler = self._scheduler if self._loop_task is not None else None
        disk = self._disk.disk if self._disk is not None else None
        return stats_of(self._statistics, self._answers, self._memory, scheduler, disk)


def _line(error: BaseException) -> str:
    """The first line of what an exception says, or its kind."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
