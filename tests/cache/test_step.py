"""The geometry of a decode step against a block that is filled token by token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.layout import Cohort, CohortLayout
from chairlift.cache.step import CohortStep, DecodeStep

SLOTS = st.lists(st.none() | st.integers(0, 40), min_size=1, max_size=6).filter(
    lambda slots: any(length is not None for length in slots)
)
"""Lengths before the step by slot; None is a free slot."""

MANY = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def cohort_step(slots: list[int | None], capacity: int = 64) -> CohortStep:
    """Rows are named by their slots."""
    rows = [None if length is None else slot for slot, length in enumerate(slots)]
    lengths = {slot: length for slot, length in enumerate(slots) if length is not None}
    return CohortStep(Cohort(0, capacity, list(rows)), 5, lengths)


def block_after(length: int, ring: int | None, width: int) -> list[int | None]:
    """Which token lies where in a slot after a step of a row that held `length`."""
    places: list[int | None] = [None] * width
    for token in range(length + 1):
        places[token if ring is None else token % ring] = token
    return places


@MANY
@given(SLOTS, st.none() | st.sampled_from((1, 4, 8, 20, 64)), st.none() | st.integers(1, 64))
def test_mask(slots: list[int | None], ring: int | None, window: int | None) -> None:
    step = cohort_step(slots)
    mask = step.mask(ring, window)
    seated = [(slot, length) for slot, length in enumerate(slots) if length is not None]
    longest = max(length for _, length in seated) + 1
    width = longest if ring is None else min(longest, ring)
    if mask is not None:
        assert mask.dtype == mx.bool_
        assert mask.shape == (seated[-1][0] + 1, 1, 1, width)
        assert np.array(mask).any(axis=-1).all(), "a query that sees nothing is NaN"
    for slot, length in seated:
        first = max(0, length + 1 - window) if window is not None else 0
        tokens = block_after(length, ring, max(width, 64))[:width]
        want = [token is not None and token >= first for token in tokens]
        got = [True] * width if mask is None else np.array(mask)[slot, 0, 0].tolist()
        assert got == want


@MANY
@given(SLOTS)
def test_rows_and_slots(slots: list[int | None]) -> None:
    step = cohort_step(slots)
    seats = [slot for slot, length in enumerate(slots) if length is not None]
    lengths = [length for length in slots if length is not None]
    assert (step.start, step.stop) == (5, 5 + len(seats))
    assert step.used == seats[-1] + 1
    assert step.lengths == lengths
    assert step.longest == max(lengths) + 1
    assert step.slots.tolist() == seats
    assert step.held.tolist() == [length + 1 for length in lengths]
    assert step.holes == (None in slots[: step.used])
    equal = len(set(lengths)) == 1 and not step.holes
    assert step.uniform == (lengths[0] if equal else None)
    fill = step.fill.tolist()
    assert [fill[slot] for slot in seats] == list(range(len(seats)))
    assert len(fill) == step.used and all(0 <= row < len(seats) for row in fill)


@MANY
@given(SLOTS, st.none() | st.sampled_from((1, 4, 8)))
def test_where_new_tokens_go(slots: list[int | None], ring: int | None) -> None:
    step = cohort_step(slots)
    new = mx.arange(1, len(step.lengths) + 1, dtype=mx.float32)[:, None, None, None]
    new = mx.broadcast_to(new, (len(step.lengths), 2, 1, 3))
    positions = step.positions(ring, 2, 3)
    assert positions.shape == (len(slots), 2, 1, 3)
    block = mx.put_along_axis(mx.zeros((len(slots), 2, 64, 3)), positions, step.by_slot(new), axis=2)
    found = np.array(block)
    row = 0
    for slot, length in enumerate(slots):
        if length is not None:
            row += 1
            at = length if ring is None else length % ring
            assert (found[slot, :, at] == row).all()
            assert (np.delete(found[slot], at, axis=1) == 0).all()
        else:
            assert (found[slot, :, 1:] == 0).all()


def test_one_length_needs_no_mask() -> None:
    assert cohort_step([7, 7, 7]).mask(None, None) is None
    assert cohort_step([7, None, 7]).mask(None, None) is None
    assert cohort_step([9, 30, 12]).mask(8, None) is None, "rings that are full"
    assert cohort_step([9, 30, 12]).mask(8, 8) is None
    assert cohort_step([3, 3]).mask(None, 4) is None
    assert cohort_step([3, 3]).mask(None, 3) is not None


def test_masks_are_made_once() -> None:
    step = cohort_step([1, 2])
    assert step.mask(None, None) is step.mask(None, 64)
    assert step.positions(None, 2, 4) is step.positions(None, 2, 4)


@pytest.mark.parametrize("single", [False, True])
def test_a_step_follows_the_layout(single: bool) -> None:
    layout = CohortLayout(single=single)
    layout.join([(1, 600), (2, 10), (3, 700), (4, 11)])
    layout.leave(2)
    step = DecodeStep(layout)
    assert step.rows == 3
    assert list(step.lengths) == [layout.lengths[row] for row in layout.rows]
    assert [part.start for part in step.cohorts] == [0, *(part.stop for part in step.cohorts[:-1])]
    assert len(step.cohorts) == (1 if single else 2)


def test_a_step_of_nobody() -> None:
    step = DecodeStep(CohortLayout())
    assert (step.rows, list(step.lengths), step.cohorts) == (0, [], [])
