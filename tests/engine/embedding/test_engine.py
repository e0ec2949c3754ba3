"""The embedding engine over a fake encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from chairlift.engine.embedding.engine import EmbeddingConfig, EmbeddingEngine
from chairlift.engine.embedding.types import LoadedEmbedder, TokenizedText, Vectors
from chairlift.engine.errors import EngineStopped, ModelUnavailable, QueueFull, StepFailed
from chairlift.engine.thread import NAME
from tests.engine.embedding.fakes import (
    NOT_A_NUMBER,
    POISON,
    FakeEncoder,
    fake_embedder,
    vector,
)


def text(*tokens: int) -> TokenizedText:
    return TokenizedText(tokens)


@asynccontextmanager
async def started(
    encoder: FakeEncoder, config: EmbeddingConfig | None = None, **model: object
) -> AsyncIterator[EmbeddingEngine]:
    embedder = EmbeddingEngine(fake_embedder(encoder, **model), config)  # type: ignore[arg-type]
    await embedder.start()
    encoder.batches.clear()
    try:
        yield embedder
    finally:
        encoder.gate.open()
        await embedder.stop()


async def at_gate(encoder: FakeEncoder) -> None:
    assert await asyncio.to_thread(encoder.gate.wait), "no batch came to the gate"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_vectors_come_in_the_order_of_the_texts() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(max_batch_tokens=8)) as embedder:
        texts = [text(*range(1, 1 + length)) for length in (3, 7, 1, 7, 2, 5)]
        vectors = await embedder.encode(texts)
        assert vectors.dtype == np.float32
        assert vectors.tolist() == [vector(each) for each in texts]
        assert all(len(batch) * max(map(len, batch)) <= 8 for batch in encoder.batches)
        stats = embedder.stats()
        assert (stats.requests, stats.texts, stats.tokens) == (1, 6, 25)
        assert (stats.waiting, stats.running, stats.stalled_s) == (0, 0, 0.0)
        assert stats.batches == len(encoder.batches)


async def test_requests_that_come_together_share_a_batch() -> None:
    encoder = FakeEncoder()
    async with started(encoder) as embedder:
        asked = [[text(n, n)] for n in range(1, 6)]
        answers = await asyncio.gather(*map(embedder.encode, asked))
        assert [answer.tolist() for answer in answers] == [[vector(one)] for (one,) in asked]
        assert [len(batch) for batch in encoder.batches] == [5]


async def test_those_that_come_while_a_batch_runs_share_the_next() -> None:
    encoder = FakeEncoder()
    async with started(encoder) as embedder:
        encoder.gate.close()
        first = asyncio.create_task(embedder.encode([text(9)]))
        await at_gate(encoder)
        assert embedder.stats().running == 1
        others = [asyncio.create_task(embedder.encode([text(n)])) for n in (1, 2, 3)]
        await until(lambda: embedder.stats().waiting == 3)
        encoder.gate.open()
        await asyncio.gather(first, *others)
        assert [len(batch) for batch in encoder.batches] == [1, 3]


async def test_a_short_request_is_not_behind_all_of_a_long_one() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(max_batch_tokens=10)) as embedder:
        encoder.gate.close()
        long = asyncio.create_task(embedder.encode([text(*[1] * 10)] * 20))
        await at_gate(encoder)
        short = asyncio.create_task(embedder.encode([text(5)]))
        await until(lambda: embedder.stats().waiting == 2)
        encoder.gate.open()
        await short
        assert len(encoder.batches) <= 4
        await long


async def test_a_cancelled_request_is_not_computed_further() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(max_batch_tokens=2)) as embedder:
        encoder.gate.close()
        leaving = asyncio.create_task(embedder.encode([text(7, 7)] * 50))
        await at_gate(encoder)
        staying = asyncio.create_task(embedder.encode([text(8, 8)]))
        await until(lambda: embedder.stats().waiting == 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert embedder.stats().waiting == 1
        encoder.gate.open()
        assert (await staying).tolist() == [vector(text(8, 8))]
        assert encoder.batches == [[text(7, 7)], [text(8, 8)]]


async def test_a_full_queue_refuses() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(max_waiting=1)) as embedder:
        encoder.gate.close()
        running = asyncio.create_task(embedder.encode([text(1)]))
        await at_gate(encoder)
        waiting = asyncio.create_task(embedder.encode([text(2)]))
        await until(lambda: embedder.stats().waiting == 1)
        with pytest.raises(QueueFull) as refusal:
            await embedder.encode([text(3)])
        assert refusal.value.retry_after >= 1
        encoder.gate.open()
        await asyncio.gather(running, waiting)


async def test_nobody_fails_for_anothers_text() -> None:
    encoder = FakeEncoder()
    async with started(encoder) as embedder:
        outcomes = await asyncio.gather(
            embedder.encode([text(1), text(2)]),
            embedder.encode([text(3), text(POISON)]),
            embedder.encode([text(4), text(NOT_A_NUMBER), text(5)]),
            embedder.encode([text(6)]),
            return_exceptions=True,
        )
        first, poisoned, nan, last = outcomes
        assert isinstance(first, np.ndarray) and first.tolist() == [vector(text(1)), vector(text(2))]
        assert isinstance(last, np.ndarray) and last.tolist() == [vector(text(6))]
        assert isinstance(poisoned, StepFailed) and "poisoned" not in poisoned.message
        assert isinstance(nan, StepFailed) and "not a number" in nan.message
        assert (await embedder.encode([text(7)])).tolist() == [vector(text(7))]
        assert embedder.stats().waiting == 0


async def test_texts_of_unequal_lengths_are_apart_where_padding_is_not_harmless() -> None:
    encoder = FakeEncoder()
    async with started(encoder, padding=False) as embedder:
        await embedder.encode([text(1, 1), text(2), text(3, 3), text(4)])
        assert [[len(each) for each in batch] for batch in encoder.batches] == [[2, 2], [1, 1]]


async def test_before_and_after_its_life() -> None:
    encoder = FakeEncoder()
    embedder = EmbeddingEngine(fake_embedder(encoder))
    with pytest.raises(EngineStopped, match="loading"):
        await embedder.encode([text(1)])
    await embedder.start()
    assert embedder.ready
    with pytest.raises(EngineStopped):
        await embedder.start()
    await embedder.stop()
    await embedder.stop()
    with pytest.raises(EngineStopped, match="shutting down"):
        await embedder.encode([text(1)])
    assert (encoder.closed, embedder.wedged) == (1, False)
    assert encoder.threads == {NAME}


async def test_stop_lets_what_waits_finish_within_the_drain() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(max_batch_tokens=1)) as embedder:
        encoder.gate.close()
        asked = asyncio.create_task(embedder.encode([text(1), text(2)]))
        await at_gate(encoder)
        stop = asyncio.create_task(embedder.stop(1000))
        await until(lambda: embedder.draining)
        with pytest.raises(EngineStopped):
            await embedder.encode([text(3)])
        encoder.gate.open()
        assert (await asked).tolist() == [vector(text(1)), vector(text(2))]
        await stop
        assert encoder.closed == 1


async def test_what_is_left_after_the_drain_ends_with_an_error() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(max_batch_tokens=1)) as embedder:
        encoder.gate.close()
        asked = asyncio.create_task(embedder.encode([text(1), text(2)]))
        await at_gate(encoder)
        stop = asyncio.create_task(embedder.stop())
        with pytest.raises(EngineStopped):
            await asked
        encoder.gate.open()
        await stop
        assert len(encoder.batches) == 1 and encoder.closed == 1


async def test_nobody_hangs_on_a_batch_that_lacks_a_vector() -> None:
    class Lacking(FakeEncoder):
        def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
            return super().encode(texts)[: 1 if len(texts) < 3 else 2]

    async with started(Lacking()) as embedder:
        asked = asyncio.create_task(embedder.encode([text(1), text(2), text(3)]))
        assert embedder._loop_task is not None
        done, _ = await asyncio.wait({asked, embedder._loop_task}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {asked}
        assert isinstance(asked.exception(), StepFailed)
        assert (await embedder.encode([text(4)])).tolist() == [vector(text(4))]


async def test_a_thread_that_does_not_come_back_is_given_up() -> None:
    encoder = FakeEncoder()
    async with started(encoder, EmbeddingConfig(close_timeout=0.05)) as embedder:
        encoder.gate.close()
        asked = asyncio.create_task(embedder.encode([text(1)]))
        await at_gate(encoder)
        assert embedder.stats().stalled_s > 0
        await embedder.stop()
        assert embedder.wedged
        with pytest.raises(EngineStopped):
            await asked


async def test_a_model_that_cannot_be_loaded_or_cannot_compute() -> None:
    def unloadable() -> LoadedEmbedder:
        raise ValueError("no such tensor\nmore")

    embedder = EmbeddingEngine(unloadable)
    with pytest.raises(ModelUnavailable, match="could not be loaded: no such tensor$"):
        await embedder.start()
    assert not embedder.ready

    embedder = EmbeddingEngine(fake_embedder(FakeEncoder(lambda text: [float("nan")] * 4)))
    with pytest.raises(ModelUnavailable, match="cannot compute"):
        await embedder.start()
    assert not embedder.ready
