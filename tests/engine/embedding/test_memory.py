"""Batches within a budget: made smaller, waited for, or refused; and what is reserved is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.embedding.engine import EmbeddingConfig, EmbeddingEngine
from chairlift.engine.embedding.memory import LEAST_TOKENS, BatchMemory
from chairlift.engine.embedding.types import BatchCost, EmbeddingModelInfo, TokenizedText
from chairlift.engine.errors import ContextLengthExceeded, EngineStopped, ModelUnavailable, QueueFull
from chairlift.engine.memory.budget import Account, Budget, Kind
from chairlift.engine.memory.guard import LEAST_CACHE, SPARE
from tests.engine.embedding.fakes import FakeEncoder, fake_embedder, vector
from tests.engine.embedding.test_engine import at_gate, until

MB = 10**6
COST = BatchCost(MB, 10_000)
CONTEXT, BATCH, WEIGHTS = 1000, 128, 50 * MB
OWN = int(SPARE * COST.of(BATCH))
"""Of one text of 128 tokens, the largest batch."""


def text(length: int) -> TokenizedText:
    return TokenizedText(tuple(range(1, 1 + length % 200)) + (1,) * (length - length % 200))


def info(**more: int) -> EmbeddingModelInfo:
    return EmbeddingModelInfo("e", CONTEXT, 4, 256, 0, batch_cost=COST, weight_bytes=WEIGHTS, **more)


def memory(budget: Budget, batch: int = BATCH) -> BatchMemory:
    return BatchMemory.of(info(), None, batch, budget, None, lambda: None)


@asynccontextmanager
async def started(
    budget: Budget, encoder: FakeEncoder, config: EmbeddingConfig | None = None
) -> AsyncIterator[EmbeddingEngine]:
    model = fake_embedder(
        encoder, context_length=CONTEXT, batch_tokens=BATCH, batch_cost=COST, weight_bytes=WEIGHTS
    )
    embedder = EmbeddingEngine(model, config, budget=budget)
    await embedder.start()
    encoder.batches.clear()
    try:
        yield embedder
    finally:
        encoder.gate.open()
        await embedder.stop()


def other(budget: Budget, rows: int) -> Account:
    """Another engine, whose rows take so much."""
    account = budget.account("other", lambda size: 0)
    account.use(rows)
    return account


@given(st.floats(0, 1e9), st.floats(0, 1e6), st.integers(2, 8000))
def test_what_was_measured_is_what_is_expected(token: float, pair: float, many: int) -> None:
    """With one text and one of half its length, as models are measured."""
    real, few = BatchCost(token, pair), many // 2
    found = BatchCost.measured((few, round(real.of(few))), (many, round(real.of(many))))
    for tokens in (few, many, 2 * many):
        # Bytes are whole, so one may be wrong in each measurement.
        assert found.of(tokens) == pytest.approx(real.of(tokens), rel=1e-6, abs=4 * (tokens / few) ** 2)


@given(st.integers(1, 1000), st.integers(0, 10**9), st.integers(1, 1000), st.integers(0, 10**9))
def test_no_measurement_is_forgotten(few: int, less: int, step: int, more: int) -> None:
    cost = BatchCost.measured((few, less), (few + step, more))
    assert cost.of(few) >= less * (1 - 1e-9) and cost.of(few + step) >= more * (1 - 1e-9)
    assert cost.token >= 0 and cost.pair >= 0


def test_weights_and_batches_are_reserved_and_given_back() -> None:
    budget = Budget(10**9)
    held = memory(budget)
    assert budget.used(Kind.WEIGHTS) == WEIGHTS and budget.used(Kind.HEADROOM) == OWN + LEAST_CACHE
    assert held.batch_tokens == BATCH and held.longest(CONTEXT) < CONTEXT
    assert budget.reserved == sum(each.size for each in budget.reservations)
    held.close()
    held.close()
    assert budget.reserved == 0 and budget.accounts == [] and not budget.reservations


def test_what_was_reserved_for_the_load_becomes_the_weights() -> None:
    budget = Budget(10**9)
    loading = budget.hold(Kind.WEIGHTS, "e")
    loading.claim(3 * WEIGHTS)
    held = BatchMemory.of(info(), None, BATCH, budget, loading, lambda: None)
    assert budget.used(Kind.WEIGHTS) == WEIGHTS
    held.close()
    assert budget.used(Kind.WEIGHTS) == WEIGHTS  # whoever reserved it gives it back


def test_short_of_memory_batches_are_smaller() -> None:
    quarter = int(SPARE * COST.of(BATCH // 4))
    held = memory(Budget(WEIGHTS + LEAST_CACHE + quarter))
    assert held.batch_tokens == BATCH // 4 == held.longest(CONTEXT)
    with pytest.raises(ModelUnavailable, match=rf"batch of {LEAST_TOKENS} tokens"):
        budget = Budget(WEIGHTS + LEAST_CACHE + int(SPARE * COST.of(LEAST_TOKENS)) - 1)
        memory(budget)
    assert budget.reserved == 0 and budget.accounts == []


@given(st.integers(BATCH, CONTEXT), st.integers(0, 3 * 10**9))
def test_the_longest_text_is_the_longest_that_fits(length: int, room: int) -> None:
    budget = Budget(WEIGHTS + LEAST_CACHE + OWN + room)
    held = memory(budget)
    fits = held.longest(CONTEXT)
    assert held.extra(fits) <= room and (fits == CONTEXT or held.extra(fits + 1) > room)
    assert held.begin(length) == (length <= fits)
    assert budget.used_by_requests == (held.extra(length) if length <= fits else 0)
    held.end()
    assert budget.used_by_requests == 0


def test_without_a_budget_or_a_cost_there_is_no_bound() -> None:
    for held in (
        BatchMemory.of(info(), None, BATCH, None, None, lambda: None),
        BatchMemory.of(EmbeddingModelInfo("e", 9, 4, 9, 0), None, BATCH, Budget(10), None, lambda: None),
    ):
        assert held.longest(10**6) == 10**6 and held.begin(10**6) and held.batch_tokens == BATCH


def test_an_older_request_of_another_model_comes_first() -> None:
    budget = Budget(WEIGHTS + LEAST_CACHE + OWN + 2 * 10**9)
    held, generating = memory(budget), other(budget, 0)
    generating.wait(0.0)  # since long ago
    assert not held.begin(300)
    generating.wait(None)
    assert held.begin(300)
    held.end()
    generating.use(2 * 10**9)
    assert not held.begin(300)
    assert generating.yields is not None  # it lets nobody in who came later
    held.give_up()
    assert generating.yields is None


async def test_no_batch_takes_more_than_it_has() -> None:
    budget, encoder = Budget(WEIGHTS + LEAST_CACHE + OWN // 2), FakeEncoder()
    async with started(budget, encoder) as embedder:
        texts = [text(length) for length in (3, 60, 1, 33, 32, 64, 5)]
        vectors = await embedder.encode(texts)
        assert vectors.tolist() == [vector(each) for each in texts]
        for batch in encoder.batches:
            assert len(batch) * max(map(len, batch)) <= 64
            assert SPARE * len(batch) * COST.of(max(map(len, batch))) <= budget.used(Kind.HEADROOM)
    assert budget.reserved == 0


async def test_a_long_text_waits_for_memory_and_short_ones_pass() -> None:
    extra = int(SPARE * COST.of(300)) - OWN
    budget, encoder = Budget(WEIGHTS + LEAST_CACHE + OWN + extra), FakeEncoder()
    async with started(budget, encoder) as embedder:
        generating = other(budget, 1)
        waiting = asyncio.create_task(embedder.encode([text(300), text(4)]))
        await until(lambda: generating.yields is not None)
        assert (await embedder.encode([text(5)])).tolist() == [vector(text(5))]
        assert embedder.stats().waiting == 1 and not waiting.done()
        assert budget.available == 0  # nobody else can reserve what it is to get
        encoder.gate.close()
        generating.use(0)
        await at_gate(encoder)
        assert budget.used(Kind.ROWS) == extra
        encoder.gate.open()
        assert (await waiting).tolist() == [vector(text(300)), vector(text(4))]
        await until(lambda: budget.used(Kind.ROWS) == 0)
        assert budget.available == extra and generating.yields is None


async def test_long_texts_that_have_waited_are_not_all_before_a_short_one() -> None:
    extra = int(SPARE * COST.of(300)) - OWN
    budget, encoder = Budget(WEIGHTS + LEAST_CACHE + OWN + extra), FakeEncoder()
    async with started(budget, encoder) as embedder:
        generating = other(budget, 1)
        waiting = asyncio.create_task(embedder.encode([text(300)] * 5))
        await until(lambda: generating.yields is not None)
        encoder.gate.close()
        generating.use(0)
        await at_gate(encoder)
        short = asyncio.create_task(embedder.encode([text(5)]))
        await until(lambda: embedder.stats().waiting == 2)
        encoder.gate.open()
        await asyncio.gather(waiting, short)
        assert [len(batch[0]) for batch in encoder.batches] == [300, 5, 300, 300, 300, 300]


async def test_what_never_fits_is_refused_with_the_numbers() -> None:
    budget = Budget(WEIGHTS + LEAST_CACHE + OWN + MB)
    async with started(budget, FakeEncoder()) as embedder:
        assert embedder.longest == BATCH
        with pytest.raises(ContextLengthExceeded, match=r"300 tokens: .* GB of memory more .* 1 MB\."):
            await embedder.encode([text(300)])
        assert (await embedder.encode([text(BATCH)])).tolist() == [vector(text(BATCH))]


async def test_what_no_longer_fits_is_told_while_it_waits() -> None:
    extra = int(SPARE * COST.of(300)) - OWN
    budget = Budget(WEIGHTS + LEAST_CACHE + OWN + extra)
    async with started(budget, FakeEncoder()) as embedder:
        generating = other(budget, 1)
        waiting = asyncio.create_task(embedder.encode([text(300)]))
        await until(lambda: generating.yields is not None)
        budget.hold(Kind.PROCESS).claim(MB)  # was measured
        generating.use(0)
        with pytest.raises(ContextLengthExceeded):
            await waiting
        assert (await embedder.encode([text(5)])).tolist() == [vector(text(5))]
        assert generating.yields is None


async def test_a_client_that_leaves_waits_for_no_memory() -> None:
    budget, encoder = Budget(WEIGHTS + LEAST_CACHE + OWN + 2 * 10**9), FakeEncoder()
    async with started(budget, encoder, EmbeddingConfig(max_waiting=1)) as embedder:
        generating = other(budget, 2 * 10**9)
        waiting = asyncio.create_task(embedder.encode([text(300)]))
        await until(lambda: generating.yields is not None)
        with pytest.raises(QueueFull):
            await embedder.encode([text(300)])
        waiting.cancel()
        await until(lambda: generating.yields is None)
        assert budget.accounts[0].least == 0 and embedder.stats().waiting == 0
        generating.use(0)
        assert (await embedder.encode([text(300)])).tolist() == [vector(text(300))]
        assert len(encoder.batches) == 1


async def test_who_waits_for_memory_is_told_of_the_end() -> None:
    budget = Budget(WEIGHTS + LEAST_CACHE + OWN + 2 * 10**9)
    async with started(budget, FakeEncoder()) as embedder:
        generating = other(budget, 2 * 10**9)
        waiting = asyncio.create_task(embedder.encode([text(300)]))
        await until(lambda: generating.yields is not None)
        await embedder.stop()
        with pytest.raises(EngineStopped):
            await waiting
        assert budget.reserved == 0 and generating.yields is None


async def test_a_model_without_room_is_not_served() -> None:
    budget = Budget(WEIGHTS)
    encoder = FakeEncoder()
    embedder = EmbeddingEngine(fake_embedder(encoder, batch_cost=COST), budget=budget)
    with pytest.raises(ModelUnavailable, match="does not fit"):
        await embedder.start()
    assert encoder.closed == 1 and budget.reserved == 0
