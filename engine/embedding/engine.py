"""The embedding engine: texts in, vectors out, in batches on the MLX thread.

Everything here runs on the event loop that `start` was called on, except the model's factory and the encoder,
which live on its own MLX thread, one batch at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from chairlift.engine.embedding.memory import BatchMemory
from chairlift.engine.embedding.queue import EmbeddingQueue, Entry
from chairlift.engine.embedding.types import (
    EmbeddingModelInfo,
    EmbeddingTokenizer,
    Encoder,
    LoadedEmbedder,
    TokenizedText,
    Vectors,
)
from chairlift.engine.errors import (
    SHUTTING_DOWN,
    ContextLengthExceeded,
    EngineError,
    EngineStopped,
    ModelUnavailable,
    QueueFull,
    StepFailed,
)
from chairlift.engine.memory.budget import Budget, Reservation
from chairlift.engine.thread import MLXThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Bounds of the embedding engine."""

    max_waiting: int = 256
    """Requests."""
    max_waiting_tokens: int = 2**20
    """Of all texts that wait."""
    max_batch_texts: int = 64
    max_batch_tokens: int | None = None
    """Padding included; one text may exceed it. None: the model's own (`EmbeddingModelInfo.batch_tokens`)."""
    close_timeout: float = 10.0
    """Seconds that `stop` waits for a batch on the thread and for the model to close."""


@dataclass(frozen=True, slots=True)
class EmbeddingStats:
    """Where the embedding engine stands."""

    waiting: int = 0
    """Requests of which some text still waits."""
    running: int = 0
    """Texts on the thread."""
    stalled_s: float = 0.0
    """Since the batch now on the thread was handed over; 0 between batches."""
    batches: int = 0
    requests: int = 0
    """Answered, as are the next two."""
    texts: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """A request."""

    texts: Sequence[TokenizedText]
    answer: asyncio.Future[Vectors]
    left: int
    longest: int
    """Tokens of the longest text."""
    vectors: Vectors | None = None
    """Made when the first come."""

    def fail(self, error: EngineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True)
class _Counters:
    batches: int = 0
    requests: int = 0
    texts: int = 0
    tokens: int = 0
    running: int = 0
    started: float | None = None
    busy_s: float = 0.0


class EmbeddingEngine:
    """Embeds texts, or scores pairs of them, with one model.

    Args:
        factory: called on the MLX thread; loads the model.
        config: bounds.
        budget: of memory; None: there is no bound.
        weights: what was reserved of it for the load.
    """

    info: EmbeddingModelInfo
    tokenizer: EmbeddingTokenizer

    def __init__(
        self,
        factory: Callable[[], LoadedEmbedder],
        config: EmbeddingConfig | None = None,
        *,
        budget: Budget | None = None,
        weights: Reservation | None = None,
    ) -> None:
        self.config = config or EmbeddingConfig()
        self.ready = False
        self.draining = False
        self.wedged = False
        """`stop` gave the thread up: a call on it never came back."""
        self._factory = factory
        self._budget = budget
        self._weights = weights
        self._memory = BatchMemory(0)
        self._long: deque[Entry[_Job]] = deque()
        """Texts that wait for memory."""
        self._encoder: Encoder | None = None
        self._thread: MLXThread | None = None
        self._queue: EmbeddingQueue[_Job] = EmbeddingQueue(
            self.config.max_waiting, self.config.max_waiting_tokens
        )
        self._open: set[_Job] = set()
        """Not yet answered."""
        self._counters = _Counters()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._why = SHUTTING_DOWN

    async def start(self) -> None:
        """Load the model and embed a token with it.

        Raises:
            EngineError: the model could not be loaded, in one line.
        """
        if self._thread is not None or self.draining:
            raise EngineStopped("The engine was started before.")
        self._thread = MLXThread()
        try:
            await self._load(self._thread)
            await self._test()
        except BaseException:
            await self.stop()
            raise
        self._counters = _Counters()
        self.ready = not self.draining

    async def _load(self, thread: MLXThread) -> None:
        try:
            loaded = await thread.run(self._factory)
        except EngineError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ModelUnavailable(f"The embedding model could not be loaded: {reason}") from None
        if self.draining:
            raise EngineStopped(self._why)
        self.info, self.tokenizer, self._encoder = loaded.info, loaded.tokenizer, loaded.encoder
        self._memory = BatchMemory.of(
            loaded.info,
            loaded.device,
            self.config.max_batch_tokens or loaded.info.batch_tokens,
            self._budget,
            self._weights,
            self._wake.set,
        )
        if loaded.device is not None and self._budget is not None:
            await thread.run(partial(loaded.device.bound, self._budget.total, self._budget.cache))
        self._loop_task = asyncio.create_task(self._run(), name="chairlift embedding engine")

    async def _test(self) -> None:
        try:
            await self._encode((TokenizedText((0,)),))
        except StepFailed as error:
            raise ModelUnavailable(f"The embedding model cannot compute: {error.message}") from None

    @property
    def longest(self) -> int:
        """Tokens of the longest text that may come: the context, or less where memory holds less. On any
        thread."""
        return self._memory.longest(self.info.context_length)

    async def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Vectors of the texts, or scores of the pairs, in order; call it on the event loop.

        Cancelling it drops the texts that are not yet computed. Texts are not checked here: none is empty,
        none longer than the context, and every token is the model's.

        Raises:
            EngineStopped: not started, draining or stopped.
            QueueFull: come back later.
            StepFailed: the model's computation failed, or its result is not a number.
            ContextLengthExceeded: there is no longer memory for a text of such a length.
        """
        if not self.ready:
            raise EngineStopped(self._why if self.draining else "The embedding model is still loading.")
        return await self._encode(texts)

    async def _encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        longest = max(map(len, texts), default=0)
        self._memory.check(longest)
        if len(self._long) >= self.config.max_waiting:
            raise QueueFull("Too many texts wait for memory; try again later.", self._retry_after())
        job = _Job(texts, asyncio.get_running_loop().create_future(), len(texts), longest)
        self._queue.add(job, [len(text) for text in texts], self._retry_after())
        self._open.add(job)
        self._expect()
        self._idle.clear()
        self._wake.set()
        try:
            vectors = await job.answer
        finally:
            self._queue.drop(job)
            self._open.remove(job)
            self._expect()
            self._wake.set()  # it may be this one's memory that was waited for
            if not self._open:
                self._idle.set()
        self._counters.requests += 1
        self._counters.texts += len(texts)
        self._counters.tokens += sum(map(len, texts))
        return vectors

    def _expect(self) -> None:
        self._memory.expect(max((job.longest for job in self._open), default=0))

    def _retry_after(self) -> float:
        """Seconds in which half of what waits is computed, going by the past."""
        if not self._counters.tokens:
            return 1.0
        return max(1.0, self._queue.tokens * self._counters.busy_s / self._counters.tokens / 2)

    # -- the loop

    async def _run(self) -> None:
        long = False
        while True:
            # Requests that come in one turn of the loop are in the same batch.
            await asyncio.sleep(0)
            self._wake.clear()
            # In turns: many long texts for which memory has come free are not all before a short one.
            batch = (self._taken() or self._waited()) if long else (self._waited() or self._taken())
            long = bool(batch) and self._memory.extra(batch[0].length) > 0
            if batch:
                try:
                    await self._compute(batch)
                except Exception:  # a defect of ours: nobody may hang on it
                    log.exception("A batch was not dealt with")
                    for entry in batch:
                        entry.request.fail(StepFailed("The embedding model failed on this request."))
                finally:
                    self._memory.end()
            else:
                await self._wake.wait()

    def _waited(self) -> list[Entry[_Job]]:
        """The text that waits for memory longest, if there is room now."""
        while self._long and (self._long[0].request.answer.done() or self._refused(self._long[0])):
            self._long.popleft()
        if not self._long:
            self._memory.give_up()
        elif self._memory.begin(self._long[0].length):
            return [self._long.popleft()]
        return []

    def _taken(self) -> list[Entry[_Job]]:
        """The next batch that there is room for; texts that it is lacking for are set aside."""
        while batch := self._queue.take(
            self._memory.batch_tokens, self.config.max_batch_texts, padding=self.info.padding
        ):
            first = batch[0]
            if not self._memory.extra(first.length):
                return batch
            self._long.append(first)  # alone in its batch
            if len(self._long) == 1 and (found := self._waited()):
                return found
        return []

    def _refused(self, entry: Entry[_Job]) -> bool:
        """Whether its text does not fit any more, which its client is told."""
        try:
            self._memory.check(entry.length)
        except ContextLengthExceeded as error:
            entry.request.fail(error)
            self._queue.drop(entry.request)
            return True
        return False

    async def _compute(self, batch: list[Entry[_Job]]) -> None:
        try:
            vectors = await self._on_thread([entry.request.texts[entry.index] for entry in batch])
        except Exception:  # the thread has logged it
            if len(batch) == 1:
                batch[0].request.fail(StepFailed("The embedding model failed on this request."))
                return
            # Somebody's text, or the size of all together: nobody fails for another's.
            for entry in batch:
                if not entry.request.answer.done():
                    await self._compute([entry])
            return
        for entry, vector in zip(batch, vectors, strict=True):
            self._take(entry, vector)

    async def _on_thread(self, texts: list[TokenizedText]) -> Vectors:
        assert self._thread is not None and self._encoder is not None
        counters = self._counters
        counters.running, counters.started = len(texts), time.monotonic()
        try:
            return await self._thread.run(partial(self._encoder.encode, texts))
        finally:
            counters.batches += 1
            counters.busy_s += time.monotonic() - counters.started
            counters.running, counters.started = 0, None

    def _take(self, entry: Entry[_Job], vector: Vectors) -> None:
        job = entry.request
        if job.answer.done():
            return
        if not np.isfinite(vector).all():
            job.fail(StepFailed("The embedding model's result is not a number."))
            self._queue.drop(job)
            return
        if job.vectors is None:
            job.vectors = np.empty((len(job.texts), len(vector)), np.float32)
        job.vectors[entry.index] = vector
        job.left -= 1
        if not job.left:
            job.answer.set_result(job.vectors)

    # -- the end

    async def stop(self, drain_timeout: float = 0.0, *, why: str = SHUTTING_DOWN) -> None:
        """Admit nothing more, let what waits be computed for so many seconds, end the rest, close the model.

        Idempotent: the first call's time-out counts.

        Args:
            why: what requests that it ends are told.
        """
        self.ready = False
        self.draining, self._why = True, why
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(
                self._shut_down(drain_timeout), name="chairlift embedding engine stop"
            )
        await asyncio.shield(self._stop_task)

    async def _shut_down(self, drain_timeout: float) -> None:
        if self._loop_task is not None:
            if self._open:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), drain_timeout)
            self._loop_task.cancel()  # a batch on the thread goes on; its outcome is dropped
            await asyncio.wait({self._loop_task})
        for job in self._open:
            job.fail(EngineStopped(self._why))
        if self._thread is None:
            return
        if self._encoder is not None:
            closing = self._thread.run(self._encoder.close)
            self._encoder = None
            done, _ = await asyncio.wait({closing}, timeout=self.config.close_timeout)
            self.wedged = not done
        if not await self._thread.end(0.0 if self.wedged else self.config.close_timeout):
            self.wedged = True
        if not self.wedged:
            self._memory.close()

    def stats(self) -> EmbeddingStats:
        counters = self._counters
        return EmbeddingStats(
            waiting=len(self._queue) + len({entry.request for entry in self._long} - self._queue.requests),
            running=counters.running,
            stalled_s=0.0 if counters.started is None else time.monotonic() - counters.started,
            batches=counters.batches,
            requests=counters.requests,
            texts=counters.texts,
            tokens=counters.tokens,
        )
