"""Steps as functions of arrays store and see what ordinary steps do, whatever joins, leaves and moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from mlx_lm.models.cache import KVCache, RotatingKVCache

from chairlift.cache.batch import RowBatch
from chairlift.cache.layout import CohortLayout
from chairlift.cache.quantized import QuantizedRow
from chairlift.cache.step import DecodeStep
from chairlift.cache.traced import (
    Decode,
    NotTraceable,
    Shape,
    TracedStep,
    TracedView,
    decode_function,
    held_of,
    run,
    shape_of,
    slots_of,
    stores_of,
)
from tests.cache.rows import HEADS, KEY_DIM, TEMPLATES, assert_same, plain

KINDS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [KVCache(), KVCache()],
    "windows": lambda: [RotatingKVCache(8), KVCache(), RotatingKVCache(100)],
}
LOOK = 5
"""Tokens that the second layer may look back, in whatever its cache keeps."""
VOCABULARY = 11


def numbers(tokens: mx.array, offset: mx.array, salt: int) -> mx.array:
    """`[rows, HEADS, 1, KEY_DIM]`, of each row's token and position."""
    place = mx.arange(HEADS * KEY_DIM).reshape(1, HEADS, 1, KEY_DIM)
    at = (tokens[:, 0] * 7 + offset * 13 + salt)[:, None, None, None]
    return mx.sin((at + place * 5).astype(mx.float32))


def forward(tokens: mx.array, caches: list[Any]) -> mx.array:
    """Logits `[rows, 1, VOCABULARY]` of a model of attention alone."""
    total = mx.zeros(())
    for layer, cache in enumerate(caches):
        mask = cache.make_mask(1, window_size=LOOK if layer == 1 else None)
        parts = (numbers(tokens, cache.offset, 10 * layer + part) for part in range(3))
        queries, keys, values = parts
        cache.update_and_fetch(keys, values)
        total = total + cache.attend(queries, scale=0.5, mask=mask)
    flat = total.reshape(tokens.shape[0], 1, HEADS * KEY_DIM)
    return flat @ mx.sin(mx.arange(HEADS * KEY_DIM * VOCABULARY).astype(mx.float32)).reshape(-1, VOCABULARY)


def ordinary(batch: RowBatch, tokens: mx.array) -> mx.array:
    step = batch.begin()
    offset = mx.array(list(step.lengths), dtype=mx.int32)
    logits = forward(tokens[:, None], batch.caches(step, offset))[:, -1]
    batch.end()
    return logits


def traced(batch: RowBatch, tokens: mx.array, compile: Callable[[Decode], Decode]) -> mx.array | None:
    step = batch.begin()
    stores = stores_of(batch)
    assert stores is not None
    logits = run(compile(decode_function(forward, stores, shape_of(step))), stores, step, tokens)
    batch.end()
    return logits


class Machine(RuleBasedStateMachine):
    """Two batches of the same rows, one stepped as ever."""

    template: Callable[[], list[Any]]

    def __init__(self) -> None:
        super().__init__()
        self.batches = [RowBatch(self.template(), floor=64) for _ in range(2)]
        self.next_row = 0

    @rule(lengths=st.lists(st.sampled_from((1, 5, 9, 61, 63, 64, 99, 120, 250)), min_size=1, max_size=4))
    def join(self, lengths: list[int]) -> None:
        rows = {}
        for length in lengths:
            caches = self.template()
            for layer, cache in enumerate(caches):
                at = mx.arange(length)[None, None, :, None] + self.next_row + layer
                keys = mx.cos(mx.broadcast_to(at, (1, HEADS, length, KEY_DIM)).astype(mx.float32))
                cache.update_and_fetch(keys, keys + 1)
            rows[self.next_row] = (caches, length)
            self.next_row += 1
        for batch in self.batches:
            batch.change(join=rows)

    @precondition(lambda self: self.batches[0].order)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.batches[0].order)))
        for batch in self.batches:
            batch.change(leave=[gone])

    @precondition(lambda self: self.batches[0].order)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for number in range(count):
            tokens = mx.arange(len(self.batches[0].order), dtype=mx.int32) * 3 + number
            want = ordinary(self.batches[0], tokens)
            got = traced(self.batches[1], tokens, lambda decode: decode)
            assert got is not None
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5, atol=1e-5)

    def teardown(self) -> None:
        first, second = self.batches
        assert first.order == second.order
        for row in first.order:
            assert_same(second.extract(row), first.extract(row))


FEW = settings(max_examples=12, stateful_step_count=12, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("kind", KINDS)
def test_any_schedule(kind: str) -> None:
    machine = type(f"{kind}Machine", (Machine,), {"template": staticmethod(KINDS[kind])})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = FEW
    case("runTest").runTest()


def filled(lengths: list[int], *, floor: int = 64) -> RowBatch:
    batch = RowBatch(plain(), floor=floor)
    for row, length in enumerate(lengths):
        caches = plain()
        for cache in caches:
            keys = mx.cos(mx.arange(HEADS * length * KEY_DIM).reshape(1, HEADS, length, KEY_DIM) + row)
            cache.update_and_fetch(keys, keys + 1)
        batch.change(join={row: (caches, length)})
    return batch


def test_a_trace_serves_all_steps_of_its_shape() -> None:
    """Really compiled, with other tokens, lengths, rows and seats each time; two cohorts, free slots."""
    batches = [filled([3, 5, 9, 12, 14, 70]) for _ in range(2)]
    calls = []
    compiled: dict[Shape, Decode] = {}

    def compile(decode: Decode) -> Decode:
        def counted(*arguments: Any) -> Any:
            calls.append(1)
            return decode(*arguments)

        return compiled.setdefault(shape_of(batches[1].begin()), mx.compile(counted))

    def leave(row: int) -> None:
        for batch in batches:
            batch.change(leave=[row])

    def join(row: int, like: int) -> None:
        for batch in batches:
            batch.change(join={row: (batch.extract(like), batch.layout.lengths[like])})

    changes = {1: lambda: leave(1), 3: lambda: leave(2), 4: lambda: join(9, 3), 6: lambda: join(10, 9)}
    for number in range(8):
        changes.get(number, lambda: None)()
        tokens = mx.arange(len(batches[0].order), dtype=mx.int32) * 5 + number
        want, got = ordinary(batches[0], tokens), traced(batches[1], tokens, compile)
        assert got is not None
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5, atol=1e-5)
    assert len(calls) == len(compiled) == 1
    assert batches[0].order == batches[1].order == [0, 9, 10, 3, 4, 5]
    for row in batches[0].order:
        for got, want in zip(batches[1].extract(row), batches[0].extract(row), strict=True):
            np.testing.assert_allclose(np.array(got.keys), np.array(want.keys), rtol=1e-6, atol=1e-6)


def test_what_a_row_that_went_wrong_left_behind_reaches_no_other() -> None:
    batches = [filled([9, 12, 14]) for _ in range(2)]
    bad = plain()
    for cache in bad:
        cache.update_and_fetch(*(mx.full((1, HEADS, 20, KEY_DIM), mx.nan) for _ in range(2)))
    for batch in batches:
        batch.change(join={7: (bad, 20)})
        batch.change(leave=[7])
    tokens = mx.array([1, 2, 3], dtype=mx.int32)
    want, got = ordinary(batches[0], tokens), traced(batches[1], tokens, mx.compile)
    assert shape_of(batches[1].begin())[0].slots > 3
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5, atol=1e-5)


def test_planes_are_written_in_place() -> None:
    """From the step that traces on, and from the first after the cohort has grown; a free slot among them."""
    batch = filled([900, 950, 1008])
    batch.change(leave=[1])
    compiled: dict[Shape, Decode] = {}
    new = []
    for number in range(24):
        step = batch.begin()
        mx.eval(batch.arrays())
        size = sum(array.nbytes for array in batch.arrays())
        before = places(batch)
        new.append(shape_of(step) not in compiled)
        stores = stores_of(batch) or []
        decode = mx.compile(decode_function(forward, stores, shape_of(step)))
        decode = compiled.setdefault(shape_of(step), decode)
        mx.reset_peak_memory()
        used = mx.get_active_memory()
        mx.eval(run(decode, stores, step, mx.arange(2, dtype=mx.int32) + number))
        batch.end()
        assert mx.get_peak_memory() - used < size / 2
        assert places(batch) == before
    assert [number for number, first in enumerate(new) if first] == [0, 16]


def places(batch: RowBatch) -> list[int]:
    return [np.asarray(array).__array_interface__["data"][0] for array in batch.arrays()]


def test_a_cohort_without_tokens_has_to_wait() -> None:
    batch = RowBatch(plain())
    batch.change(join={1: (plain(), 0)})
    assert traced(batch, mx.array([1], dtype=mx.int32), lambda decode: decode) is None


@pytest.mark.parametrize("kind", ["recurrent", "nested"])
def test_other_layers_are_left_alone(kind: str) -> None:
    assert stores_of(RowBatch(TEMPLATES[kind]())) is None


def test_quantized_and_dense_batches_are_left_alone() -> None:
    assert stores_of(RowBatch([QuantizedRow(8, KVCache)])) is None
    assert stores_of(RowBatch(plain(), dense=True)) is None
    assert stores_of(RowBatch([])) is None


def test_what_a_step_depends_on() -> None:
    layout = CohortLayout(floor=64)
    layout.join([(row, length) for row, length in enumerate([4, 5, 6, 7, 100])])
    before = shape_of(DecodeStep(layout))
    layout.leave(1)
    step = DecodeStep(layout)
    assert shape_of(step) == before == ((4, 64), (1, 128))
    assert slots_of(before) == 5
    assert held_of(step).tolist() == [4, 0, 6, 7, 100]
    assert [cohort.rows_by_slot for cohort in step.cohorts] == [[0, 0, 1, 2], [3]]


@pytest.mark.parametrize(
    "ask",
    [
        lambda view: view._idx,
        lambda view: view.cohorts[0].lengths,
        lambda view: view.cohorts[0].equal,
        lambda view: view.by_parts(None, None, []),
    ],
)
def test_numbers_that_change_are_not_told(ask: Callable[[TracedView], Any]) -> None:
    layout = CohortLayout()
    layout.join([(1, 4), (2, 9)])
    step = DecodeStep(layout)
    twin = TracedStep(shape_of(step), held_of(step))
    store = (stores_of(RowBatch(plain())) or [])[0]
    with pytest.raises(NotTraceable):
        ask(TracedView(store, twin, twin.offset))


def test_an_offset_read_on_the_host_is_an_error() -> None:
    batch = filled([4, 9])

    def reads(tokens: mx.array, caches: list[Any]) -> mx.array:
        caches[0].offset.tolist()
        return forward(tokens, caches)

    stores = stores_of(batch) or []
    step = batch.begin()
    decode = mx.compile(partial(decode_function(reads, stores, shape_of(step))))
    with pytest.raises(Exception, match="eval"):
        run(decode, stores, step, mx.array([1, 2], dtype=mx.int32))
    assert ordinary(batch, mx.array([1, 2], dtype=mx.int32)).shape == (2, VOCABULARY)
