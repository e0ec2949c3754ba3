"""The embedding engine: texts in, vectors out, in batches on the MLX thread.

Everything here runs on the event loop that `start` was called on, except the model's factory and the encoder.
Beside a generating engine it computes on that engine's MLX thread, one batch at a time: the thread works off
its calls in order, so between two batches there is always a step, if one is due, and a step waits for one
batch at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from chairlift.engine.embedding.queue import EmbeddingQueue, Entry
from chairlift.engine.embedding.types import (
    EmbeddingModelInfo,
    EmbeddingTokenizer,
    Encoder,
    LoadedEmbedder,
    TokenizedText,
    Vectors,
)
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineError, EngineStopped, ModelUnavailable, StepFailed
from chairlift.engine.thread import MLXThread

STOPPED = "The server is shutting down."


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
    """

    info: EmbeddingModelInfo
    tokenizer: EmbeddingTokenizer

    def __init__(self, factory: Callable[[], LoadedEmbedder], config: EmbeddingConfig | None = None) -> None:
        self.config = config or EmbeddingConfig()
        self.ready = False
        self.draining = False
        self.wedged = False
        """`stop` gave the thread up: a call on it never came back."""
        self._factory = factory
        self._encoder: Encoder | None = None
        self._thread: MLXThread | None = None
        self._owns_thread = False
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

    async def start(self, beside: Engine | None = None) -> None:
        """Load the model and embed a token with it.

        Args:
            beside: a started engine, whose MLX thread is shared; its `stop` stops this one too. None: a
                thread of its own.

        Raises:
            EngineError: the model could not be loaded, in one line.
        """
        if self._thread is not None or self.draining:
            raise EngineStopped("The engine was started before.")
        self._owns_thread = beside is None
        self._thread = MLXThread() if beside is None else beside.share_thread(self)
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
            raise EngineStopped(STOPPED)
        self.info, self.tokenizer, self._encoder = loaded.info, loaded.tokenizer, loaded.encoder
        self._loop_task = asyncio.create_task(self._run(), name="chairlift embedding engine")

    async def _test(self) -> None:
        try:
            await self._encode((TokenizedText((0,)),))
        except StepFailed as error:
            raise ModelUnavailable(f"The embedding model cannot compute: {error.message}") from None

    async def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Vectors of the texts, or scores of the pairs, in order; call it on the event loop.

        Cancelling it drops the texts that are not yet computed. Texts are not checked here: none is empty,
        none longer than the context, and every token is the model's.

        Raises:
            EngineStopped: not started, draining or stopped.
            QueueFull: come back later.
            StepFailed: the model's computation failed, or its result is not a number.
        """
        if not self.ready:
            raise EngineStopped(STOPPED if self.draining else "The embedding model is still loading.")
        return await self._encode(texts)

    async def _encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        job = _Job(texts, asyncio.get_running_loop().create_future(), len(texts))
        self._queue.add(job, [len(text) for text in texts], self._retry_after())
        self._open.add(job)
        self._idle.clear()
        self._wake.set()
        try:
            vectors = await job.answer
        finally:
            self._queue.drop(job)
            self._open.remove(job)
            if not self._open:
                self._idle.set()
        self._counters.requests += 1
        self._counters.texts += len(texts)
        self._counters.tokens += sum(map(len, texts))
        return vectors

    def _retry_after(self) -> float:
        """Seconds in which half of what waits is computed, going by the past."""
        if not self._counters.tokens:
            return 1.0
        return max(1.0, self._queue.tokens * self._counters.busy_s / self._counters.tokens / 2)

    # -- the loop

    async def _run(self) -> None:
        while True:
            # Requests that come in one turn of the loop are in the same batch.
            await asyncio.sleep(0)
            batch = self._queue.take(
                self.config.max_batch_tokens or self.info.batch_tokens,
                self.config.max_batch_texts,
                padding=self.info.padding,
            )
            if batch:
                await self._compute(batch)
            else:
                self._wake.clear()
                await self._wake.wait()

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

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Admit nothing more, let what waits be computed for so many seconds, end the rest, close the model.

        Idempotent: the first call's time-out counts.
        """
        self.ready = False
        self.draining = True
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
            job.fail(EngineStopped(STOPPED))
        if self._thread is None:
            return
        if self._encoder is not None:
            closing = self._thread.run(partial(self._encoder.close, thread_ends=self._owns_thread))
            self._encoder = None
            done, _ = await asyncio.wait({closing}, timeout=self.config.close_timeout)
            self.wedged = not done
        if self._owns_thread and not await self._thread.end(
            0.0 if self.wedged else self.config.close_timeout
        ):
            self.wedged = True

    def stats(self) -> EmbeddingStats:
        counters = self._counters
        return EmbeddingStats(
            waiting=len(self._queue),
            running=counters.running,
            stalled_s=0.0 if counters.started is None else time.monotonic() - counters.started,
            batches=counters.batches,
            requests=counters.requests,
            texts=counters.texts,
            tokens=counters.tokens,
        )
