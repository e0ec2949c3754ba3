"""Made-up rows for tests of batches: what a model would store of each token, and each row's own caches.

Keys, values and states are pure functions of row, layer and position, so a token that ends up in another
place is seen. A row's reference is upstream's own cache, stepped alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from chairlift.cache.batch import RowBatch

HEADS, KEY_DIM, VALUE_DIM, STATE = 2, 2, 3, (3, 2)
TOKEN_BYTES = HEADS * (KEY_DIM + VALUE_DIM) * 4
STATE_BYTES = STATE[0] * STATE[1] * 4

Template = Callable[[], list[Any]]


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches below any nesting, in order."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def tokens(row: int, leaf: int, positions: Sequence[int], dim: int, salt: int) -> mx.array:
    """float32 `[1, HEADS, positions, dim]`, exact in any float type of 16 bits or more."""
    at = np.asarray(positions)[None, None, :, None]
    head, place = np.arange(HEADS)[None, :, None, None], np.arange(dim)[None, None, None, :]
    numbers = (row * 37 + leaf * 11 + at * 13 + head * 3 + place * 5 + salt) % 251 + 1
    return mx.array((numbers / 4).astype(np.float32))


def feed(leaf: Any, index: int, rows: Sequence[int], positions: Sequence[Sequence[int]]) -> None:
    """What a model's layer does with its cache: `positions[i]` are the new tokens of `rows[i]`. A state is
    the sum of its tokens: exact, so in any chunks the same."""
    pairs = list(zip(rows, positions, strict=True))
    if isinstance(leaf, ArraysCache):
        for which in range(len(leaf.cache)):
            steps = mx.concatenate([tokens(row, index, at, 6, 50 * which) for row, at in pairs])
            state = leaf[which]
            state = mx.zeros((len(rows), *STATE)) if state is None else state
            leaf[which] = state + steps[:, 0].sum(axis=1).reshape(-1, *STATE)
        return
    keys = mx.concatenate([tokens(row, index, at, KEY_DIM, 0) for row, at in pairs])
    values = mx.concatenate([tokens(row, index, at, VALUE_DIM, 100) for row, at in pairs])
    leaf.update_and_fetch(keys, values)


class Alone:
    """One row by itself on upstream's caches."""

    def __init__(self, template: Template, row: int, chunks: Sequence[int] = ()) -> None:
        self.row = row
        self.caches = template()
        self.length = 0
        for chunk in chunks:
            self.grow(chunk)

    def grow(self, count: int) -> None:
        if count:
            positions = range(self.length, self.length + count)
            for index, leaf in enumerate(leaves(self.caches)):
                feed(leaf, index, [self.row], [positions])
            self.length += count


def step(batch: RowBatch) -> None:
    """One token of every row."""
    geometry = batch.begin()
    offset = mx.array(list(geometry.lengths), dtype=mx.int32)
    for index, leaf in enumerate(leaves(batch.caches(geometry, offset))):
        feed(leaf, index, batch.order, [[length] for length in geometry.lengths])
    batch.end()


def contents(cache: Any) -> list[np.ndarray | None]:
    """What a single-request cache holds: states, or the keys and values of the tokens it keeps, in order."""
    if isinstance(cache, ArraysCache):
        return [None if state is None else np.array(state) for state in cache.cache]
    if cache.keys is None:
        return [None, None]
    if isinstance(cache, RotatingKVCache):
        kept = min(cache.offset, cache.max_size)
        ordered = [cache._temporal_order(array) for array in (cache.keys, cache.values)]
        return [np.array(array)[:, :, array.shape[2] - kept :] for array in ordered]
    return [np.array(array)[:, :, : cache.offset] for array in (cache.keys, cache.values)]


def assert_same(got: Sequence[Any], want: Sequence[Any]) -> None:
    """Two rows' caches hold the same bits and stand at the same token. A state not yet written may be zeros,
    which recurrent layers start from."""
    got_leaves, want_leaves = list(leaves(got)), list(leaves(want))
    assert [type(leaf) for leaf in got_leaves] == [type(leaf) for leaf in want_leaves]
    for ours, theirs in zip(got_leaves, want_leaves, strict=True):
        if isinstance(theirs, KVCache | RotatingKVCache):
            assert ours.offset == theirs.offset
        for array, reference in zip(contents(ours), contents(theirs), strict=True):
            if reference is None:
                assert array is None or (isinstance(theirs, ArraysCache) and not array.any())
            else:
                assert array is not None and array.dtype == reference.dtype
                np.testing.assert_array_equal(array, reference)


def plain() -> list[Any]:
    return [KVCache(), KVCache()]


def windowed() -> list[Any]:
    return [RotatingKVCache(8), KVCache(), RotatingKVCache(100), RotatingKVCache(300)]


def recurrent() -> list[Any]:
    return [ArraysCache(2), ArraysCache(1)]


def nested() -> list[Any]:
    inner = CacheList(KVCache(), ArraysCache(1))
    return [ArraysCache(2), CacheList(RotatingKVCache(8), inner), KVCache()]


TEMPLATES: dict[str, Template] = {
    "plain": plain,
    "windowed": windowed,
    "recurrent": recurrent,
    "nested": nested,
}
