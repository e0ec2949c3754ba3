"""Quantized keys and values: a row in a batch holds the codes that it would hold alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from chairlift.cache import quantized
from chairlift.cache.batch import RowBatch, tokens_held
from chairlift.cache.quantized import (
    QuantizedKV,
    QuantizedRow,
    UnsupportedQuantization,
    decode,
    encode,
    group_size,
    quantized_caches,
)
from chairlift.cache.views import AttendView
from tests.cache import rows
from tests.cache.rows import Alone, assert_same, leaves, nested, plain, step, windowed

KEY_DIM, VALUE_DIM = 64, 96
"""Groups of 64 in keys, of 32 in values."""
KINDS = {"plain": plain, "windowed": windowed, "nested": nested}


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "KEY_DIM", KEY_DIM)
    monkeypatch.setattr(rows, "VALUE_DIM", VALUE_DIM)


def parts(caches: Sequence[Any]) -> list[Any]:
    """The caches with each quantized one as the three that it consists of."""
    found: list[Any] = []
    for leaf in leaves(caches):
        found += leaf.parts if isinstance(leaf, QuantizedRow) else [leaf]
    return found


def assert_same_codes(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert_same(parts(got), parts(want))


def random_rows(lengths: Sequence[int], dim: int, seed: int) -> list[mx.array]:
    """float32 `[1, HEADS, length, dim]` each."""
    keys = mx.random.split(mx.random.key(seed), len(lengths))
    return [mx.random.normal((1, rows.HEADS, n, dim), key=key) for n, key in zip(lengths, keys, strict=True)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_any_schedule(kind: str, bits: int) -> None:
    """Joins, leaves, steps, extracts and joins of what was extracted, bit for bit."""
    draw = random.Random(f"{kind}/{bits}")

    def template() -> list[Any]:
        return quantized_caches(KINDS[kind](), bits)

    batch = RowBatch(template())
    alone: dict[int, Alone] = {}
    for number in range(30):
        event = draw.choice(("join", "step", "step", "leave", "again"))
        if event == "join" or not alone:
            length = draw.choice((0, 1, 7, 8, 9, 63, 101, 254, 256, 301, 600))
            cut = draw.randrange(length + 1)
            row = Alone(template, number, [cut, length - cut, *[1] * draw.randrange(3)])
            batch.change(join={number: (row.caches, row.length)})
            alone[number] = row
        elif event == "step":
            for _ in range(draw.randrange(1, 5)):
                step(batch)
                for row in alone.values():
                    row.grow(1)
        else:
            some = draw.choice(sorted(alone))
            taken = batch.extract(some)
            assert tokens_held(taken) == tokens_held(alone[some].caches)
            again = {some: (taken, alone[some].length)} if event == "again" else {}
            batch.change(leave=[some], join=again)
            if not again:
                del alone[some]
        for id, row in alone.items():
            assert_same_codes(batch.extract(id), row.caches)
        assert batch.nbytes == sum(array.nbytes for array in batch.arrays()) >= batch.held_nbytes
    batch.clear()
    assert (batch.nbytes, batch.held_nbytes) == (0, 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_those_of_codes_scales_and_biases(bits: int) -> None:
    row = Alone(lambda: quantized_caches(plain(), bits), 1, [100])
    batch = RowBatch.merge(row.caches, {1: row.caches})
    groups = KEY_DIM // 64 + VALUE_DIM // 32
    a_token = 2 * rows.HEADS * ((KEY_DIM + VALUE_DIM) * bits // 8 + groups * 2 * 4)
    assert batch.held_nbytes == 100 * a_token
    assert batch.nbytes == 128 * a_token
    assert sum(cache.nbytes for cache in row.caches) == 256 * a_token
    unquantized = Alone(plain, 1, [100])
    assert RowBatch.merge(unquantized.caches, {1: unquantized.caches}).held_nbytes > 3 * 100 * a_token


@pytest.mark.parametrize("bits", [8, 4])
def test_mlx_lm_caches_join_and_come_back_code_for_code(bits: int) -> None:
    theirs = QuantizedKVCache(group_size=64, bits=bits)
    for keys, values in zip(random_rows((70, 1), 64, 0), random_rows((70, 1), 128, 1), strict=True):
        theirs.update_and_fetch(keys, values)
    batch = RowBatch.merge(quantized_caches([KVCache()], bits), {5: [theirs]})
    assert batch.layout.lengths == {5: 71}
    (taken,) = batch.extract(5)
    given = taken.give()
    assert type(given) is QuantizedKVCache
    assert (given.offset, given.group_size, given.bits) == (71, 64, bits)
    for side, own in zip(given.keys_and_values(), theirs.keys_and_values(), strict=True):
        for array, want in zip(side, own, strict=True):
            assert array.dtype == want.dtype
            np.testing.assert_array_equal(np.array(array), np.array(want))
    # Both go on alike.
    keys, values = random_rows((1,), 64, 2)[0], random_rows((1,), 128, 3)[0]
    further = [cache.update_and_fetch(keys, values) for cache in (given, theirs)]
    for side, own in zip(*further, strict=True):
        for array, want in zip(side, own, strict=True):
            np.testing.assert_array_equal(np.array(array), np.array(want))


def test_what_mlx_lm_has_no_cache_for() -> None:
    ring = QuantizedRow(8, lambda: RotatingKVCache(8))
    with pytest.raises(ValueError, match="no sliding window"):
        ring.give()
    mixed = Alone(lambda: quantized_caches([KVCache()], 8), 1, [3]).caches[0]
    with pytest.raises(ValueError, match="one size of groups"):
        mixed.give()
    empty = QuantizedRow(4, KVCache).give()
    assert (empty.offset, empty.bits, empty.keys) == (0, 4, None)
    assert QuantizedRow.take(empty).offset == 0


@pytest.mark.parametrize(
    "cache",
    [QuantizedKVCache(group_size=32, bits=8), QuantizedKVCache(group_size=64, bits=4), KVCache()],
    ids=["groups", "bits", "unquantized"],
)
def test_a_row_of_another_kind_does_not_join(cache: Any) -> None:
    cache.update_and_fetch(*random_rows((3, 3), 64, 0))
    batch = RowBatch(quantized_caches([KVCache()], 8))
    with pytest.raises(ValueError, match="cannot join|joins from a cache of 8 bits"):
        batch.change(join={1: ([cache], 3)})


def test_a_model_reads_the_numbers_and_never_the_codes() -> None:
    row = QuantizedRow(8, KVCache)
    given = random_rows((5, 5), 64, 0)
    for array, back in zip(given, row.update_and_fetch(*given), strict=True):
        assert (back.shape, back.dtype) == (array.shape, array.dtype)
        assert 0 < np.abs(np.array(back) - np.array(array)).max() < 0.03
    for name in ("keys", "values", "bits"):
        assert not hasattr(row, name), "upstream's attention would take it for its own"


def test_rows_forget_their_last_tokens_in_every_part() -> None:
    row = Alone(lambda: quantized_caches([KVCache()], 8), 1, [9]).caches[0]
    assert row.is_trimmable() and row.trim(4) == 4
    assert (row.offset, row.size(), row.keys_and_values()[0].shape[2], row.empty()) == (5, 5, 5, False)


def reference(
    queries: mx.array, store: QuantizedKV, key: int, slot: int, seen: Sequence[int], scale: float
) -> np.ndarray:
    """Attention of one row in float64 over the numbers that codes stand for, at the positions `seen`."""
    planes = store.blocks[key].planes
    keys, values = (
        np.array(decode([plane[slot : slot + 1] for plane in planes[side::2]], store._bits), np.float64)[0]
        for side in (0, 1)
    )
    out = []
    for head, query in enumerate(np.array(queries, np.float64)[:, 0]):
        held, given = keys[head // 2, list(seen)], values[head // 2, list(seen)]
        scores = held @ query * scale
        weights = np.exp(scores - scores.max())
        out.append(weights @ given / weights.sum())
    return np.stack(out)[:, None]


@pytest.mark.parametrize("products", [True, False], ids=["codes", "numbers"])
@pytest.mark.parametrize("ring", [None, 16])
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_over_a_cohort(
    bits: int, ring: int | None, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of unequal lengths beside a free slot. Values wider than keys go by the numbers in any case."""
    width = 64 if products else 128
    monkeypatch.setattr(quantized, "products_agree", lambda *_: products)
    lengths = {1: 70, 2: 3, 3: 40, 4: 9}

    def template() -> list[Any]:
        return quantized_caches([KVCache() if ring is None else RotatingKVCache(ring)], bits)

    batch = RowBatch(template())
    for row, length in lengths.items():
        caches = template()
        caches[0].update_and_fetch(*random_rows((length,), 64, row), *random_rows((length,), width, 10 + row))
        batch.change(join={row: (caches, length)})
    batch.change(leave=[3])
    geometry = batch.begin()
    (view,) = batch.caches(geometry, mx.array(list(geometry.lengths), dtype=mx.int32))
    assert isinstance(view, AttendView) and geometry.cohorts[0].holes
    count = len(batch.order)
    new = [mx.concatenate(random_rows([1] * count, dim, seed)) for dim, seed in ((64, 20), (width, 21))]
    view.update_and_fetch(*new)
    queries = mx.random.normal((count, 2 * rows.HEADS, 1, 64), key=mx.random.key(30))
    before = np.array(queries)
    for window in (None, 7) if ring is None else (None,):
        got = view.attend(queries, scale=0.2, mask=view.make_mask(1, window_size=window))
        np.testing.assert_array_equal(np.array(queries), before)
        for index, row in enumerate(batch.order):
            after = lengths[row] + 1
            first = max(0, after - (window or ring or after))
            seen = [at if ring is None else at % ring for at in range(first, after)]
            place, store = batch.layout.places[row], view.store
            assert isinstance(store, QuantizedKV)
            want = reference(queries[index], store, place.cohort, place.slot, seen, 0.2)
            np.testing.assert_allclose(np.array(got[index]), want, atol=2e-6)


def test_the_products_are_tried_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized.products_agree.cache_clear()
    assert quantized.products_agree(64, 3, 8, mx.float32)
    with monkeypatch.context() as patch:
        right = quantized_scaled_dot_product_attention
        for wrong in (lambda *a, **k: right(*a, **k) * 0, lambda *a, **k: 1 / 0):
            quantized.products_agree.cache_clear()
            patch.setattr(quantized, "quantized_scaled_dot_product_attention", wrong)
            assert not quantized.products_agree(64, 3, 8, mx.float32)
    quantized.products_agree.cache_clear()


def test_a_row_that_went_wrong_leaves_nothing_in_its_slot() -> None:
    def row(length: int, seed: int, factor: float = 1.0) -> list[Any]:
        caches = quantized_caches([KVCache()], 8)
        keys, values = random_rows((length, length), 64, seed)
        caches[0].update_and_fetch(keys * factor, values * factor)
        return caches

    batch = RowBatch(quantized_caches([KVCache()], 8))
    batch.change(join={1: (row(60, 1, float("nan")), 60), 2: (row(50, 2), 50), 3: (row(50, 3), 50)})
    place = batch.layout.places[1]
    batch.change(leave=[1], join={4: (row(5, 4), 5)})
    assert batch.layout.places[4] == place
    geometry = batch.begin()
    (view,) = batch.caches(geometry, mx.array(list(geometry.lengths), dtype=mx.int32))
    view.update_and_fetch(*(mx.concatenate(random_rows((1, 1, 1), 64, seed)) for seed in (5, 6)))
    out = view.attend(mx.ones((3, rows.HEADS, 1, 64)), scale=0.1, mask=view.make_mask(1))
    assert mx.all(mx.isfinite(out)).item()


def test_groups() -> None:
    assert [group_size(width) for width in (64, 128, 192, 32, 96, 160)] == [64, 64, 64, 32, 32, 32]
    for width in (16, 80, 100):
        with pytest.raises(UnsupportedQuantization, match=f"heads of {width} numbers"):
            group_size(width)
    codes, scales, biases = encode(mx.ones((2, 3, 96)), 4)
    assert (codes.shape, scales.shape, biases.shape) == ((2, 3, 12), (2, 3, 3), (2, 3, 3))


def test_caches_that_cannot_be_quantized() -> None:
    made = quantized_caches([ArraysCache(2), CacheList(KVCache(), ArraysCache(1))], 8)
    assert [type(leaf) for leaf in leaves(made)] == [ArraysCache, QuantizedRow, ArraysCache]
    with pytest.raises(UnsupportedQuantization, match="ChunkedKVCache"):
        quantized_caches([KVCache(), ChunkedKVCache(8)], 8)
    with pytest.raises(UnsupportedQuantization, match="RotatingKVCache"):
        quantized_caches([RotatingKVCache(8, keep=4)], 8)
    with pytest.raises(UnsupportedQuantization, match="keeps no keys and values"):
        quantized_caches([ArraysCache(2)], 8)


def test_attention_that_cannot_read_codes() -> None:
    row = Alone(lambda: quantized_caches(plain(), 8), 1, [3])
    batch = RowBatch.merge(row.caches, {1: row.caches})
    geometry = batch.begin()
    view = batch.caches(geometry, mx.array([3], dtype=mx.int32))[0]
    view.update_and_fetch(random_rows((1,), KEY_DIM, 1)[0], random_rows((1,), VALUE_DIM, 2)[0])
    queries = mx.ones((1, rows.HEADS, 1, KEY_DIM))
    with pytest.raises(UnsupportedQuantization, match="sinks"):
        view.attend(queries, scale=1.0, mask=None, sinks=mx.zeros(rows.HEADS))
    with pytest.raises(UnsupportedQuantization, match="arithmetic on the keys"):
        view.by_parts(lambda arrays, mask, cache: cache.keys_and_values()[0], None, [queries])
