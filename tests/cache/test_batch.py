"""Rows in a batch hold what they would hold alone, whatever joins, leaves and steps around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from chairlift.cache.attention import CohortKV
from chairlift.cache.batch import RowBatch, UnsupportedCache, tokens_held
from tests.cache.rows import (
    STATE_BYTES,
    TEMPLATES,
    TOKEN_BYTES,
    Alone,
    Template,
    assert_same,
    leaves,
    nested,
    plain,
    recurrent,
    step,
    windowed,
)

LENGTHS = st.sampled_from((0, 1, 5, 7, 8, 9, 20, 63, 64, 99, 101, 250, 254, 256, 301, 600))


def stores(batch: RowBatch) -> list[CohortKV]:
    return batch._attention


class Machine(RuleBasedStateMachine):
    """A batch, and each of its rows alone."""

    template: Template
    dense = False

    def __init__(self) -> None:
        super().__init__()
        self.batch = RowBatch(self.template(), dense=self.dense)
        self.alone: dict[int, Alone] = {}
        self.taken: list[tuple[list[Any], Alone]] = []
        self.next_row = 0

    def fresh(self, length: int, cut: int, decoded: int) -> Alone:
        """A row prefilled in two chunks, and some tokens further one by one, as a cache may come to be."""
        cut = min(cut, length)
        row = Alone(self.template, self.next_row, [cut, length - cut, *[1] * decoded])
        self.next_row += 1
        return row

    def blocks(self) -> dict[tuple[int, int], tuple[mx.array, ...]]:
        """(layer, cohort) -> the arrays that hold it."""
        return {
            (layer, key): tuple(block.planes)
            for layer, store in enumerate(stores(self.batch))
            for key, block in store.blocks.items()
        }

    def assert_untouched(
        self, before: dict[tuple[int, int], tuple[mx.array, ...]], cohorts: set[int]
    ) -> None:
        """All blocks but those of `cohorts` are the very arrays they were."""
        after = self.blocks()
        for (layer, key), arrays in before.items():
            if key not in cohorts:
                assert all(new is old for new, old in zip(after[layer, key], arrays, strict=True))

    @rule(
        lengths=st.lists(LENGTHS, min_size=1, max_size=4), cut=st.integers(0, 80), decoded=st.integers(0, 3)
    )
    def join(self, lengths: list[int], cut: int, decoded: int) -> None:
        rows = {row.row: row for row in (self.fresh(length, cut, decoded) for length in lengths)}
        before = self.blocks()
        self.batch.change(join={id: (row.caches, row.length) for id, row in rows.items()})
        self.alone |= rows
        self.assert_untouched(before, {self.batch.layout.places[row].cohort for row in rows})

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), replacement=st.none() | LENGTHS)
    def leave(self, data: st.DataObject, replacement: int | None) -> None:
        """A row leaves; another may take its place in the same breath."""
        gone = data.draw(st.sampled_from(sorted(self.alone)))
        cohorts = {self.batch.layout.places[gone].cohort}
        before = self.blocks()
        joining = {}
        if replacement is not None:
            row = self.fresh(replacement, 3, 0)
            joining = {row.row: row}
        self.batch.change(
            leave=[gone, 10**6], join={id: (row.caches, row.length) for id, row in joining.items()}
        )
        del self.alone[gone]
        self.alone |= joining
        self.assert_untouched(before, cohorts | {self.batch.layout.places[row].cohort for row in joining})

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        kept = data.draw(st.sets(st.sampled_from(sorted(self.alone)), min_size=1))
        self.batch.filter(kept)
        self.alone = {row: self.alone[row] for row in self.alone if row in kept}

    @rule(lengths=st.lists(LENGTHS, min_size=1, max_size=3), steps=st.integers(0, 2))
    def extend(self, lengths: list[int], steps: int) -> None:
        rows = {row.row: row for row in (self.fresh(length, 30, 0) for length in lengths)}
        other = RowBatch(self.template(), dense=self.dense)
        other.change(join={id: (row.caches, row.length) for id, row in rows.items()})
        for _ in range(steps):
            step(other)
            for row in rows.values():
                row.grow(1)
        self.batch.extend(other)
        self.alone |= rows

    @precondition(lambda self: self.alone)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            step(self.batch)
            for row in self.alone.values():
                row.grow(1)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        """Kept to the end, to see that the batch leaves it alone; a copy of it goes on by itself."""
        row = data.draw(st.sampled_from(sorted(self.alone)))
        copy, again = Alone(self.template, row), Alone(self.template, row)
        for alone in (copy, again):
            alone.caches, alone.length = self.batch.extract(row), self.alone[row].length
        want = Alone(self.template, row, [again.length, *[1] * 10])
        for _ in range(10):
            again.grow(1)
        assert_same(again.caches, want.caches)
        self.taken.append((copy.caches, Alone(self.template, row, [copy.length])))

    @invariant()
    def every_row_is_what_it_is_alone(self) -> None:
        assert sorted(self.batch.order) == sorted(self.alone)
        assert self.batch.order == self.batch.layout.rows
        assert self.batch.layout.lengths == {row: alone.length for row, alone in self.alone.items()}
        for row, alone in self.alone.items():
            assert_same(self.batch.extract(row), alone.caches)

    @invariant()
    def bytes_are_those_of_the_arrays(self) -> None:
        assert self.batch.nbytes == sum(array.nbytes for array in self.batch.arrays())
        kinds = list(leaves(self.template()))
        states = sum(len(leaf.cache) for leaf in kinds if isinstance(leaf, ArraysCache))
        windows = [getattr(leaf, "max_size", 10**9) for leaf in kinds if not isinstance(leaf, ArraysCache)]
        held = sum(min(row.length, window) for row in self.alone.values() for window in windows)
        state_bytes = self.batch.held_nbytes - held * TOKEN_BYTES
        # Rows not yet written hold nothing, or zeros beside others that are.
        assert state_bytes in (0, states * STATE_BYTES * len(self.alone))
        assert state_bytes or not states or not any(row.length for row in self.alone.values())
        assert self.batch.held_nbytes <= self.batch.nbytes

    def teardown(self) -> None:
        for caches, want in self.taken:
            assert_same(caches, want.caches)
        self.batch.clear()
        assert (self.batch.nbytes, self.batch.held_nbytes) == (0, 0)
        assert self.batch.order == self.batch.arrays() == []


FEW = settings(max_examples=8, stateful_step_count=10, deadline=None, derandomize=True, database=None)


CASES = [
    (kind, dense) for kind in TEMPLATES for dense in (False, True) if (kind, dense) != ("recurrent", True)
]


@pytest.mark.parametrize(("kind", "dense"), CASES)
def test_any_schedule(kind: str, dense: bool) -> None:
    machine = type(f"{kind}Machine", (Machine,), {"template": staticmethod(TEMPLATES[kind]), "dense": dense})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = FEW
    case("runTest").runTest()


def test_merge_takes_the_lengths_from_the_caches() -> None:
    rows = {7: Alone(nested, 7, [12]), 3: Alone(nested, 3, [0]), 5: Alone(nested, 5, [300])}
    batch = RowBatch.merge(nested(), {row: alone.caches for row, alone in rows.items()})
    assert batch.layout.lengths == {7: 12, 3: 0, 5: 300}
    step(batch)
    for row, alone in rows.items():
        alone.grow(1)
        assert_same(batch.extract(row), alone.caches)


@pytest.mark.parametrize(
    ("caches", "held"),
    [
        (list, 0),
        (lambda: Alone(plain, 0, [9]).caches, 9),
        (lambda: Alone(windowed, 0, [40, 1]).caches, 41),
        (lambda: Alone(recurrent, 0, [9]).caches, 0),
        (lambda: [ArraysCache(1), CacheList(ArraysCache(1), CacheList(*Alone(plain, 0, [6]).caches))], 6),
        (lambda: [KVCache(), *Alone(plain, 0, [6]).caches], 6),
    ],
)
def test_tokens_held(caches: Callable[[], list[Any]], held: int) -> None:
    assert tokens_held(caches()) == held


@pytest.mark.parametrize(
    "cache",
    [
        RotatingKVCache(8, keep=4),
        ChunkedKVCache(8),
        QuantizedKVCache(),
        CacheList(KVCache(), QuantizedKVCache()),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_other_caches_are_refused_by_name(cache: Any) -> None:
    with pytest.raises(UnsupportedCache, match="cannot share a batch"):
        RowBatch([cache])


def test_a_row_that_is_there_already_is_refused() -> None:
    batch = RowBatch(plain())
    rows = {row: (Alone(plain, row, [3]).caches, 3) for row in (1, 2)}
    batch.change(join=rows)
    with pytest.raises(ValueError, match="Row 2 is already in the batch"):
        batch.change(join={3: rows[1], 2: rows[2]})
    assert batch.order == batch.layout.rows == [1, 2]


def test_a_row_may_leave_and_come_back_at_once() -> None:
    batch = RowBatch(nested())
    batch.change(join={row: (Alone(nested, row, [4]).caches, 4) for row in range(3)})
    again = Alone(nested, 1, [70])
    batch.change(leave=[1], join={1: (again.caches, 70)})
    step(batch)
    again.grow(1)
    assert_same(batch.extract(1), again.caches)
    assert_same(batch.extract(2), Alone(nested, 2, [4, 1]).caches)


def arrays_of(store: CohortKV, cohort: int) -> list[mx.array]:
    return store.blocks[cohort].planes


def buffer(array: mx.array) -> int:
    """Where an array's memory is."""
    return int(np.asarray(array).__array_interface__["data"][0])


def test_a_join_and_a_leave_copy_no_other_cohort() -> None:
    batch = RowBatch(plain())
    rows = [(row, 5000 if row < 2 else 100) for row in range(5)]
    batch.change(join={row: (Alone(plain, row, [length]).caches, length) for row, length in rows})
    step(batch)
    mx.eval(batch.arrays())
    long, short = (batch.layout.places[row].cohort for row in (0, 4))
    assert long != short
    before = [buffer(array) for store in stores(batch) for array in arrays_of(store, long)]
    batch.change(join={9: (Alone(plain, 9, [90]).caches, 90)})
    batch.change(leave=[2, 3])
    step(batch)
    mx.eval(batch.arrays())
    assert batch.layout.places[9].cohort == short
    assert [buffer(array) for store in stores(batch) for array in arrays_of(store, long)] == before


def test_a_join_into_a_free_slot_copies_nothing_of_its_cohort() -> None:
    batch = RowBatch(plain())
    batch.change(join={row: (Alone(plain, row, [100]).caches, 100) for row in range(5)})
    batch.change(leave=[2])
    step(batch)
    mx.eval(batch.arrays())
    before = [buffer(array) for array in batch.arrays()]
    batch.change(join={9: (Alone(plain, 9, [90]).caches, 90)})
    step(batch)
    mx.eval(batch.arrays())
    assert [buffer(array) for array in batch.arrays()] == before
    assert_same(batch.extract(9), Alone(plain, 9, [90, 1]).caches)


def test_an_extracted_row_keeps_no_buffer_of_the_batch() -> None:
    batch = RowBatch(plain())
    batch.change(join={row: (Alone(plain, row, [3000]).caches, 3000) for row in range(8)})
    step(batch)
    mx.eval(batch.arrays())
    row = batch.extract(2)
    mx.eval([array for leaf in leaves(row) for array in (leaf.keys, leaf.values)])
    before = mx.get_active_memory()
    size = batch.nbytes
    batch.clear()
    assert before - mx.get_active_memory() >= size
