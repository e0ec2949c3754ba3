"""Attention by parts: each part gets its own rows, positions, mask and cache, and its output goes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from chairlift.cache.batch import RowBatch
from chairlift.cache.parts import CohortCache
from chairlift.cache.separate import SeparateRows
from chairlift.cache.views import SpanStep

HEADS, DIM = 2, 4


def rows_of(x: mx.array) -> mx.array:
    """`[rows, tokens, HEADS * DIM]` as keys."""
    return x.reshape(x.shape[0], x.shape[1], HEADS, DIM).transpose(0, 2, 1, 3)


def attention(arrays: Sequence[mx.array], mask: Any, cache: Any) -> mx.array:
    """A model's own: doubles the keys that the cache returns, which no view could."""
    (x,) = arrays
    keys, values = cache.update_and_fetch(rows_of(x), rows_of(x))
    out = mx.fast.scaled_dot_product_attention(rows_of(x), keys * 2, values + 1, scale=0.5, mask=mask)
    return out.transpose(0, 2, 1, 3).reshape(x.shape)


def tokens(row: int, start: int, stop: int) -> mx.array:
    """Inputs `[1, tokens, width]` of a row's positions."""
    key = mx.random.key(row)
    return mx.random.normal((1, 600, HEADS * DIM), key=key)[:, start:stop]


def mask_for(cache: Any, count: int) -> Any:
    return cache.make_mask(count, return_array=False, window_size=None)


def filled(row: int, length: int, window: int | None = None) -> Any:
    cache = KVCache() if window is None else RotatingKVCache(max_size=window)
    if length:
        attention([tokens(row, 0, length)], mask_for(cache, length), cache)
    return cache


def alone(row: int, start: int, stop: int, window: int | None = None) -> mx.array:
    cache = filled(row, start, window)
    return attention([tokens(row, start, stop)], mask_for(cache, stop - start), cache)


def batch_of(lengths: dict[int, int], window: int | None = None) -> RowBatch:
    template = [KVCache() if window is None else RotatingKVCache(max_size=window)]
    batch = RowBatch(template)
    batch.change(join={row: ([filled(row, n, window)], n) for row, n in lengths.items()})
    return batch


@pytest.mark.parametrize("window", [None, 16])
def test_decode_rows_of_several_cohorts_with_holes_and_chunks(window: int | None) -> None:
    lengths = {0: 3, 1: 70, 2: 9, 3: 560, 4: 20}
    batch = batch_of(lengths, window)
    batch.change(leave=[2])
    step = batch.begin()
    assert len(step.cohorts) == 2 and step.cohorts[0].holes
    chunk = [(SpanStep(4, 9, 30), [filled(7, 30, window)]), (SpanStep(9, 10, 0), [filled(8, 0, window)])]
    positions = [*step.lengths, *range(30, 35), 0, 0, 0]
    (view,) = batch.caches(step, mx.array(positions, dtype=mx.int32), chunk, 2)
    inputs = [tokens(row, lengths[row], lengths[row] + 1) for row in batch.order]
    inputs += [tokens(7, 30, 35).swapaxes(0, 1), tokens(8, 0, 1), mx.zeros((2, 1, HEADS * DIM))]
    out = view.by_parts(attention, view.make_mask(1), [mx.concatenate(inputs)])
    want = [alone(row, lengths[row], lengths[row] + 1, window)[0] for row in batch.order]
    want += [alone(7, 30, 35, window)[0], alone(8, 0, 1, window)[0]]
    assert out.shape == (12, 1, HEADS * DIM)
    assert mx.allclose(out[:10, 0], mx.concatenate(want), atol=1e-5)
    assert mx.array_equal(out[10:], mx.zeros((2, 1, HEADS * DIM)))
    batch.end()
    for row in batch.order:
        cache, solo = batch.extract(row)[0], filled(row, lengths[row] + 1, window)
        assert cache.offset == lengths[row] + 1
        assert window is not None or mx.allclose(cache.keys, solo.keys[:, :, : cache.offset])


def test_positions_and_further_arrays_go_with_their_rows() -> None:
    batch = batch_of({0: 3, 1: 70, 2: 560})
    step = batch.begin()
    seen: list[tuple[list[int], list[int]]] = []

    def note(arrays: Sequence[mx.array], mask: Any, cache: Any) -> mx.array:
        offset = cache.offset
        positions: Any = offset.tolist() if isinstance(offset, mx.array) else [offset]
        scales: Any = arrays[1].reshape(-1).tolist()
        seen.append((positions, scales))
        return attention(arrays[:1], mask, cache)

    chunk = [(SpanStep(3, 5, 7), [filled(9, 7)])]
    (view,) = batch.caches(step, mx.array([*step.lengths, 7, 8], dtype=mx.int32), chunk)
    scales = mx.array([*step.lengths, 7, 8], dtype=mx.int32).reshape(-1, 1, 1, 1)
    view.by_parts(note, view.make_mask(1), [mx.zeros((5, 1, HEADS * DIM)), scales])
    assert seen == [([3, 70], [3, 70]), ([560], [560]), ([7], [7, 8])]


def test_a_mask_of_the_models_own_is_refused() -> None:
    batch = batch_of({0: 3})
    (view,) = batch.caches(batch.begin(), mx.array([3]))
    with pytest.raises(TypeError, match="takes the mask of its cache, not array"):
        view.by_parts(attention, mx.ones((1, 1)), [tokens(0, 3, 4)])


@pytest.mark.parametrize("dense", [False, True])
def test_attention_that_takes_one_row_is_refused_in_cohorts(dense: bool) -> None:
    batch = RowBatch([KVCache()], dense=dense)
    batch.change(join={row: ([filled(row, 3)], 3) for row in (0, 1)})
    (view,) = batch.caches(batch.begin(), mx.array([3, 3]))
    with pytest.raises(TypeError, match="one row at a time"):
        view.by_parts(attention, None, [mx.zeros((2, 1, HEADS * DIM))], alone=True)


def test_a_dense_block_is_one_part() -> None:
    lengths = {0: 3, 1: 70}
    batch = RowBatch([KVCache()], dense=True)
    batch.change(join={row: ([filled(row, n)], n) for row, n in lengths.items()})
    (view,) = batch.caches(batch.begin(), mx.array([3, 70]))
    out = view.by_parts(attention, view.make_mask(1), [mx.concatenate([tokens(0, 3, 4), tokens(1, 70, 71)])])
    want = mx.concatenate([alone(0, 3, 4), alone(1, 70, 71)])
    assert mx.allclose(out, want, atol=1e-5)


def test_a_layer_of_several_caches_gets_a_list_for_each_part() -> None:
    def pair(row: int, length: int) -> CacheList:
        return CacheList(filled(row, length), filled(row + 50, length))

    def both(arrays: Sequence[mx.array], mask: Any, cache: Any) -> mx.array:
        assert isinstance(cache, CacheList)
        return attention(arrays, mask, cache[0]) + attention([arrays[0] * 3], mask, cache[1])

    batch = RowBatch([CacheList(KVCache(), KVCache())])
    batch.change(join={0: ([pair(0, 3)], 3), 1: ([pair(1, 20)], 20)})
    step = batch.begin()
    (view,) = batch.caches(step, mx.array([3, 20, 0, 1]), [(SpanStep(2, 4, 0), [pair(2, 0)])])
    inputs = [tokens(0, 3, 4), tokens(1, 20, 21), tokens(2, 0, 2).swapaxes(0, 1)]
    out = view.by_parts(both, view[0].make_mask(1), [mx.concatenate(inputs)])
    want = [
        both([tokens(row, start, stop)], mask_for(filled(row, start), stop - start), pair(row, start))[0]
        for row, start, stop in ((0, 3, 4), (1, 20, 21), (2, 0, 2))
    ]
    assert mx.allclose(out[:, 0], mx.concatenate(want), atol=1e-5)


def test_arrays_that_a_model_ties_together_are_kept_but_zeroed_values_are_not() -> None:
    batch = batch_of({0: 3})
    step = batch.begin()
    store = batch._attention[0]
    cache = CohortCache(store, step.cohorts[0], mx.array([3]))
    before = cache.values
    cache.keys = mx.depends(cache.keys, [mx.zeros(1)])
    cache.values = mx.zeros((1,))
    assert cache.values is before
    assert cache.keys is store.blocks[step.cohorts[0].key].keys


# Rows with caches of their own


def test_separate_rows_join_step_and_leave() -> None:
    rows = SeparateRows([KVCache()])
    rows.change(join={5: ([filled(0, 3)], 3), 6: ([filled(1, 30)], 30)})
    assert rows.order == [5, 6]
    step = rows.begin()
    assert list(step.lengths) == [3, 30]
    (view,) = rows.caches(step, mx.array([3, 30, 0, 1]), [(SpanStep(2, 4, 0), [filled(2, 0)])])
    inputs = [tokens(0, 3, 4), tokens(1, 30, 31), tokens(2, 0, 2).swapaxes(0, 1)]
    out = view.by_parts(attention, view.make_mask(1), [mx.concatenate(inputs)], alone=True)
    want = [alone(0, 3, 4)[0], alone(1, 30, 31)[0], alone(2, 0, 2)[0]]
    assert mx.array_equal(out[:, 0], mx.concatenate(want))
    rows.end()
    assert list(rows.begin().lengths) == [4, 31]
    held = rows.nbytes
    rows.change(leave=[5, 77])
    assert rows.order == [6] and 0 < rows.nbytes < held
    rows.clear()
    assert (rows.order, rows.nbytes, rows.held_nbytes) == ([], 0, 0)


def test_separate_rows_attend_by_the_seam_too() -> None:
    rows = SeparateRows([RotatingKVCache(max_size=16)])
    rows.change(join={0: ([filled(0, 40, 16)], 40), 1: ([filled(1, 3, 16)], 3)})
    (view,) = rows.caches(rows.begin(), mx.array([40, 3]))
    x = mx.concatenate([tokens(0, 40, 41), tokens(1, 3, 4)])
    keys, _ = view.update_and_fetch(rows_of(x), rows_of(x))
    out = keys.attend(rows_of(x), scale=0.5, mask=view.make_mask(1))
    for index, (row, length) in enumerate(((0, 40), (1, 3))):
        cache = filled(row, length, 16)
        new = rows_of(tokens(row, length, length + 1))
        solo = mx.fast.scaled_dot_product_attention(new, *cache.update_and_fetch(new, new), scale=0.5)
        assert mx.allclose(out[index : index + 1], solo, atol=1e-6)


def test_a_cache_that_only_the_model_knows_goes_by_parts() -> None:
    rows = SeparateRows([ChunkedKVCache(8)])
    rows.change(join={0: ([ChunkedKVCache(8)], 0)})
    (view,) = rows.caches(rows.begin(), mx.array([0]))
    assert not hasattr(view, "update_and_fetch")
    seen: list[Any] = []

    class Mask:
        def for_part(self, cache: Any, tokens: int) -> str:
            seen.append((type(cache), tokens))
            return "own"

    def note(arrays: Sequence[mx.array], mask: Any, cache: Any) -> mx.array:
        seen.append(mask)
        return arrays[0]

    view.by_parts(note, Mask(), [tokens(0, 0, 1)], alone=True)
    assert seen == [(ChunkedKVCache, 1), "own"]
