"""Any schedule of joins, leaves and steps equals a list of rows, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache

from chairlift.cache.mamba import BatchMambaCache

DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8, mx.bool_, mx.complex64)
ACTIONS = ("extend", "filter", "advance", "write", "extract", "merge")


@dataclass
class Row:
    """What a row should hold: `states[w]` is None until written, then the row's numbers."""

    states: list[list[float] | None]
    padding: int = 0
    length: int | None = None


class Case:
    """One shape of states, and the random choices of one schedule."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.size = data.draw(st.integers(1, 4), "size")
        self.shapes = [data.draw(st.sampled_from([(), (3,), (2, 2)]), "shape") for _ in range(self.size)]
        self.dtypes = [data.draw(st.sampled_from(DTYPES), "dtype") for _ in range(self.size)]
        self.count = 0

    def values(self, which: int) -> list[float]:
        self.count += 1
        numbers = {(): 1, (3,): 3, (2, 2): 4}[self.shapes[which]]
        return [
            float((self.count * 7 + k) % 2 if self.dtypes[which] == mx.bool_ else self.count % 100 + k)
            for k in range(numbers)
        ]

    def array(self, which: int, rows: list[list[float]]) -> mx.array:
        return (
            mx.array(rows, dtype=mx.float32)
            .astype(self.dtypes[which])
            .reshape(len(rows), *self.shapes[which])
        )

    def single(self) -> tuple[ArraysCache, Row]:
        """A single-request cache, of which any states may be unwritten, perhaps in mid-prefill."""
        cache, row = ArraysCache(self.size), Row([None] * self.size)
        for which in range(self.size):
            if self.data.draw(st.booleans(), "written"):
                row.states[which] = self.values(which)
                cache[which] = self.array(which, [row.states[which]])
        row.padding = self.data.draw(st.sampled_from([0, 0, 2]), "padding")
        row.length = self.data.draw(st.sampled_from([None, None, 5]), "length")
        if row.padding:
            cache.left_padding = mx.array([row.padding])
        if row.length is not None:
            cache.lengths = mx.array([row.length])
        return cache, row

    def batch(self) -> tuple[BatchMambaCache, list[Row]]:
        singles = [self.single() for _ in range(self.data.draw(st.integers(1, 3), "rows"))]
        batch = BatchMambaCache.merge([cache for cache, _ in singles])
        return batch, joined([row for _, row in singles], self)

    def write(self, batch: BatchMambaCache, rows: list[Row], which: int) -> None:
        """What a model does in a step: every row's state is replaced."""
        for row in rows:
            row.states[which] = self.values(which)
        batch[which] = self.array(which, [row.states[which] or [] for row in rows])


def joined(rows: list[Row], case: Case) -> list[Row]:
    """A state that one row has written is zeros in the others."""
    for which in range(case.size):
        if any(row.states[which] is not None for row in rows):
            for row in rows:
                if row.states[which] is None:
                    numbers = {(): 1, (3,): 3, (2, 2): 4}[case.shapes[which]]
                    row.states[which] = [0.0] * numbers
    return rows


def same(array: mx.array, expected: mx.array) -> bool:
    """Equal in shape, dtype and every bit."""
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return False
    if array.size == 0:
        return True
    return bool(mx.array_equal(array.reshape(-1).view(mx.uint8), expected.reshape(-1).view(mx.uint8)))


def check(batch: BatchMambaCache, rows: list[Row], case: Case) -> None:
    assert batch.batch_size == len(rows)
    for which in range(case.size):
        states = [row.states[which] for row in rows]
        if all(state is None for state in states):
            assert batch[which] is None or not rows
        else:
            assert same(batch[which], case.array(which, [state or [] for state in states]))
    mask = batch.make_mask(6)
    real = [[row.padding <= k and (row.length is None or k < row.length) for k in range(6)] for row in rows]
    assert all(map(all, real)) if mask is None else mask.tolist() == real


def check_row(single: ArraysCache, row: Row, case: Case) -> None:
    for which, state in enumerate(row.states):
        assert (single[which] is None) == (state is None)
        assert state is None or same(single[which], case.array(which, [state]))
    mask = single.make_mask(6)
    real = [row.padding <= k and (row.length is None or k < row.length) for k in range(6)]
    assert all(real) if mask is None else mask.tolist() == [real]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_schedule_equals_a_list_of_rows(data: st.DataObject) -> None:
    case = Case(data)
    batch, rows = case.batch()
    for action in data.draw(
        st.lists(st.sampled_from(["extend", "filter", "advance", "write", "extract", "merge"]), max_size=8),
        "actions",
    ):
        if action == "extend":
            other, more = case.batch() if data.draw(st.booleans(), "many") else case.single()
            batch.extend(other)
            rows = joined(rows + (more if isinstance(more, list) else [more]), case)
        elif action == "filter":
            keep = data.draw(st.permutations(range(len(rows))), "keep")[: data.draw(st.integers(0, 3))]
            batch.filter(mx.array(keep, dtype=mx.int32) if data.draw(st.booleans()) else keep)
            rows = [rows[k] for k in keep]
        elif action == "advance":
            tokens = data.draw(st.integers(1, 3), "tokens")
            batch.advance(tokens)
            for row in rows:
                row.padding -= tokens
                row.length = None if row.length is None else row.length - tokens
        elif action == "write" and rows:
            case.write(batch, rows, data.draw(st.integers(0, case.size - 1), "which"))
        elif action == "extract" and rows:
            which = data.draw(st.integers(0, len(rows) - 1), "row")
            check_row(batch.extract(which), rows[which], case)
        elif action == "merge":
            batch = BatchMambaCache.merge([batch.extract(k) for k in range(len(rows))])
            if not rows:
                return
        check(batch, rows, case)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_merge_then_extract_gives_every_cache_back(data: st.DataObject) -> None:
    case = Case(data)
    singles = [case.single() for _ in range(data.draw(st.integers(1, 5), "rows"))]
    batch = BatchMambaCache.merge([cache for cache, _ in singles])
    rows = joined([row for _, row in singles], case)
    for k, row in enumerate(rows):
        check_row(batch.extract(k), row, case)
