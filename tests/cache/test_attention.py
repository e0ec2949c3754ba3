"""One attention layer's storage: single requests' caches in and out, and what a slot keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from chairlift.cache.attention import Block, CohortKV
from chairlift.cache.layout import Drop, Move, Place, Rebuild
from tests.cache.rows import HEADS, KEY_DIM, TOKEN_BYTES, VALUE_DIM, Alone, assert_same

MANY = settings(max_examples=60, deadline=None, derandomize=True, database=None)

FIRST = Place(0, 0)


def stored(make: Callable[[], Any], slots: int = 2, capacity: int = 128) -> CohortKV:
    store = CohortKV(getattr(make(), "max_size", None))
    store.apply([Rebuild(0, (), slots, capacity)])
    return store


def blocks_of(store: CohortKV, key: int = 0) -> list[np.ndarray]:
    return [np.array(plane) for plane in store.blocks[key].planes]


@MANY
@given(
    st.none() | st.sampled_from((1, 2, 8, 50, 300)),
    st.lists(st.integers(1, 70), max_size=3),
    st.integers(0, 20),
)
def test_what_is_written_is_read(window: int | None, chunks: list[int], decoded: int) -> None:
    """However the cache came about: in chunks, some larger than the window, then token by token."""

    def make() -> Any:
        return KVCache() if window is None else RotatingKVCache(window)

    alone = Alone(lambda: [make()], 3, [*chunks, *[1] * decoded])
    store = stored(make, capacity=256)
    store.write(FIRST, alone.caches[0])
    assert_same([store.read(FIRST, alone.length)], alone.caches)


@pytest.mark.parametrize("tokens", [5, 8, 9, 15, 16, 17])
def test_token_p_of_a_ring_lies_at_p_modulo_its_window(tokens: int) -> None:
    alone = Alone(lambda: [RotatingKVCache(8)], 3, [tokens])
    store = stored(lambda: RotatingKVCache(8))
    store.write(FIRST, alone.caches[0])
    full = Alone(lambda: [KVCache()], 3, [tokens]).caches[0]
    keys = blocks_of(store)[0]
    assert keys.shape[2] == 8
    for token in range(max(0, tokens - 8), tokens):
        np.testing.assert_array_equal(keys[0, :, token % 8], np.array(full.keys)[0, :, token])


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(8), lambda: RotatingKVCache(100)])
@pytest.mark.parametrize("tokens", [0, 3, 40])
def test_nothing_of_the_row_before_is_left_in_a_slot(make: Callable[[], Any], tokens: int) -> None:
    """A masked position has weight 0, but 0 times NaN is NaN."""
    store = stored(make)
    gone = Alone(lambda: [make()], 1, [90]).caches[0]
    gone.keys, gone.values = gone.keys * mx.nan, gone.values * mx.inf
    store.write(FIRST, gone)
    store.write(Place(0, 1), Alone(lambda: [make()], 4, [20]).caches[0])
    store.write(FIRST, Alone(lambda: [make()], 2, [tokens] if tokens else []).caches[0])
    for array in blocks_of(store):
        assert np.isfinite(array).all()
        assert (array[0, :, tokens:] == 0).all()
        assert (array[1, :, :8] != 0).all()


def test_nothing_is_left_behind_a_row_that_moves() -> None:
    store = stored(KVCache)
    gone = Alone(lambda: [KVCache()], 1, [90]).caches[0]
    gone.values = gone.values * mx.nan
    store.write(FIRST, gone)
    alone = Alone(lambda: [KVCache()], 2, [7])
    store.write(Place(0, 1), alone.caches[0])
    store.apply([Move((0, 1), (0, 0), 7)])
    assert all((array[0, :, 7:] == 0).all() for array in blocks_of(store))
    assert_same([store.read(FIRST, 7)], alone.caches)


@pytest.mark.parametrize("window", [None, 8, 100])
def test_rebuilding_keeps_the_rows_of_its_sources(window: int | None) -> None:
    def make() -> Any:
        return KVCache() if window is None else RotatingKVCache(window)

    rows = [Alone(lambda: [make()], row, [30 + row]) for row in range(4)]
    store = stored(make, slots=4, capacity=64)
    for slot, row in enumerate(rows):
        store.write(Place(0, slot), row.caches[0])
    store.apply([Rebuild(0, (1, 3), 2, 64), Rebuild(0, (0, 1), 3, 192)])
    assert (store.blocks[0].slots, store.blocks[0].capacity) == (3, min(192, window or 192))
    assert_same([store.read(Place(0, 0), 31)], rows[1].caches)
    assert_same([store.read(Place(0, 1), 33)], rows[3].caches)
    assert store.nbytes == 3 * min(192, window or 192) * TOKEN_BYTES


def test_a_full_ring_is_not_copied_when_its_cohort_grows() -> None:
    store = stored(lambda: RotatingKVCache(8), capacity=64)
    store.write(FIRST, Alone(lambda: [RotatingKVCache(8)], 0, [20]).caches[0])
    before = store.blocks[0]
    store.apply([Rebuild(0, (0, 1), 2, 192)])
    assert store.blocks[0] is before


def test_a_row_moves_to_another_cohort() -> None:
    for make in (KVCache, lambda: RotatingKVCache(8)):
        row = Alone(lambda make=make: [make()], 1, [20])  # type: ignore[misc]
        store = stored(make)
        store.write(FIRST, row.caches[0])
        store.apply([Rebuild(1, (), 1, 192), Move((0, 0), (1, 0), 20), Drop(0)])
        assert list(store.blocks) == [1]
        assert_same([store.read(Place(1, 0), 20)], row.caches)


def places(array: mx.array) -> range:
    """Where the numbers lie; a BufferError where they are not in order."""
    mx.eval(array)
    first = np.frombuffer(memoryview(array), dtype=np.float32).ctypes.data  # type: ignore[arg-type]
    return range(first, first + array.nbytes)


@pytest.mark.parametrize("tokens", [8, 16, 24])
def test_a_row_that_fills_its_block_is_copied_in_order(tokens: int) -> None:
    store = stored(lambda: RotatingKVCache(8), slots=1)
    alone = Alone(lambda: [RotatingKVCache(8)], 0, [tokens])
    store.write(FIRST, alone.caches[0])
    written = [places(plane) for plane in store.blocks[0].planes]
    taken = store.read(FIRST, tokens)
    assert_same([taken], alone.caches)
    read = [places(plane) for plane in (taken.keys, taken.values)]
    assert not {at for lies in written for at in lies} & {at for lies in read for at in lies}


def test_a_row_that_fills_its_block_leaves_the_memory_of_the_one_before() -> None:
    store = stored(lambda: RotatingKVCache(8))
    alone = Alone(lambda: [RotatingKVCache(8)], 0, [20])
    store.write(FIRST, alone.caches[0])
    before = [plane[:] for plane in store.blocks[0].planes]
    held = {at for plane in before for at in places(plane)}
    store.apply([Rebuild(1, (), 1, 256), Move((0, 0), (1, 0), 20), Rebuild(0, (0,), 1, 128)])
    for key in (0, 1):
        assert not held & {at for plane in store.blocks[key].planes for at in places(plane)}
        assert_same([store.read(Place(key, 0), 20)], alone.caches)


@pytest.mark.parametrize("sources", [(0,), (1,), (0, 1), (0, 2)])
def test_a_cohort_that_is_packed_lies_in_order_in_memory_of_its_own(sources: tuple[int, ...]) -> None:
    store = stored(KVCache, slots=3, capacity=384)
    rows = [Alone(lambda: [KVCache()], row, [20 + row]) for row in range(3)]
    for slot, row in enumerate(rows):
        store.write(Place(0, slot), row.caches[0])
    before = [plane[:] for plane in store.blocks[0].planes]
    held = {at for plane in before for at in places(plane)}
    store.apply([Rebuild(0, sources, len(sources), 128)])
    assert not held & {at for plane in store.blocks[0].planes for at in places(plane)}
    for slot, source in enumerate(sources):
        assert_same([store.read(Place(0, slot), 20 + source)], rows[source].caches)


def test_memory_comes_with_the_first_tokens() -> None:
    store = stored(KVCache, slots=3, capacity=128)
    assert (store.nbytes, store.bytes_per_token) == (0, 0)
    store.write(FIRST, KVCache())
    assert store.nbytes == 0
    assert_same([store.read(FIRST, 0)], [KVCache()])
    store.write(FIRST, Alone(lambda: [KVCache()], 0, [1]).caches[0])
    assert (store.nbytes, store.bytes_per_token) == (3 * 128 * TOKEN_BYTES, TOKEN_BYTES)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_type_of_the_tokens_is_kept(dtype: mx.Dtype) -> None:
    cache = KVCache()
    cache.update_and_fetch(
        mx.ones((1, HEADS, 3, KEY_DIM), dtype=dtype), mx.ones((1, HEADS, 3, VALUE_DIM), dtype=dtype)
    )
    store = stored(KVCache)
    store.write(FIRST, cache)
    read = store.read(FIRST, 3)
    assert read.keys.dtype == read.values.dtype == dtype


def test_a_cache_of_several_rows_is_refused() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((2, HEADS, 3, KEY_DIM)), mx.ones((2, HEADS, 3, VALUE_DIM)))
    with pytest.raises(ValueError, match="batch 1, not 2"):
        stored(KVCache).write(FIRST, cache)


def test_a_cache_that_keeps_its_first_tokens_is_refused() -> None:
    cache = Alone(lambda: [RotatingKVCache(8, keep=2)], 0, [20]).caches[0]
    with pytest.raises(ValueError, match="keeps its first tokens"):
        stored(lambda: RotatingKVCache(8)).write(FIRST, cache)


def test_a_block_clears_behind_a_row_only() -> None:
    block = Block(2, 4)
    block.clear(0, 0)
    assert block.nbytes == 0
    block.allocate([mx.ones((1, 1, 1, 2))] * 2)
    block.planes = [mx.ones((2, 1, 4, 2)) for _ in range(2)]
    block.clear(1, 3)
    block.clear(0, 4)
    for plane in block.planes:
        assert np.array(plane)[:, 0, :, 0].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
