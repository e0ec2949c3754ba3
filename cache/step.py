"""The geometry of one decode step: computed once, shared by all layers.

Every array here is built from Python integers: no device value is read. Masks are boolean, True where a
query may look, shaped `[used slots, 1, 1, keys]`, and None where every row may look at every key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.layout import Cohort, CohortLayout


class CohortShape(NamedTuple):
    """What of a cohort's geometry stays the same from step to step while it is not rebuilt."""

    slots: int
    """Free ones included."""
    capacity: int


class CohortStep:
    """One cohort in one step.

    Attributes:
        key: the cohort's key.
        shape: slots and capacity.
        seats: the slot of each row, in order.
        start, stop: its rows are `[start, stop)` of the batch.
        used: slots in use, holes below the last row included.
        lengths: tokens held before this step, by row.
        longest: tokens that the longest row holds after this step.
        uniform: the length before this step where all rows agree and no slot is free; else None.
        known: what one layer made of the masks, for the next.
    """

    def __init__(self, cohort: Cohort, start: int, lengths: dict[int, int]) -> None:
        self.key = cohort.key
        self.start = start
        seats = [(slot, row) for slot, row in enumerate(cohort.slots) if row is not None]
        self.stop = start + len(seats)
        self.used = seats[-1][0] + 1
        self.lengths = [lengths[row] for _, row in seats]
        self.longest = max(self.lengths) + 1
        self.holes = self.used > len(seats)
        self.equal = len(set(self.lengths)) == 1
        self.uniform = self.lengths[0] if self.equal and not self.holes else None
        self.seats = [slot for slot, _ in seats]
        self._all = len(cohort.slots)
        self.shape = CohortShape(len(cohort.slots), cohort.capacity)
        self._masks: dict[tuple[int | None, int | None], mx.array | None] = {}
        self._positions: dict[tuple[int | None, int, int], mx.array] = {}
        self.known: dict[Any, Any] = {}

    @cached_property
    def slots(self) -> mx.array:
        """int32 `[rows]`: the slot of each row."""
        return mx.array(self.seats, dtype=mx.int32)

    @cached_property
    def held(self) -> mx.array:
        """int32 `[rows]`: tokens that each row holds after this step."""
        return mx.array([length + 1 for length in self.lengths], dtype=mx.int32)

    @cached_property
    def fill(self) -> mx.array:
        """int32 `[used]`: for each slot the row of the cohort to query for; a hole repeats some row."""
        return mx.array(self._filled(self.used), dtype=mx.int32)

    def by_slot(self, rows: mx.array) -> mx.array:
        """`[rows, ...]` spread over all slots `[slots, ...]`; free slots repeat some row."""
        if self.seats == list(range(self._all)):
            return rows
        return rows[self._fill_all]

    @cached_property
    def _fill_all(self) -> mx.array:
        return mx.array(self._filled(self._all), dtype=mx.int32)

    @property
    def held_by_slot(self) -> list[int]:
        """Tokens that each slot holds before this step; 0 where it is free."""
        held = [0] * self._all
        for slot, length in zip(self.seats, self.lengths, strict=True):
            held[slot] = length
        return held

    @property
    def rows_by_slot(self) -> list[int]:
        """For each slot a row of the batch: its own; some row of the cohort where it is free."""
        return [self.start + row for row in self._filled(self._all)]

    def _filled(self, slots: int) -> list[int]:
        rows = [0] * slots
        for row, slot in enumerate(self.seats):
            rows[slot] = row
        return rows

    def positions(self, ring: int | None, heads: int, dim: int) -> mx.array:
        """int32 `[slots, heads, 1, dim]`: where each slot's new token goes, in a ring of `ring` tokens or a
        full row. Free slots write to position 0, which whoever takes the slot overwrites."""
        key = (ring, heads, dim)
        if key not in self._positions:
            at = [held if ring is None else held % ring for held in self.held_by_slot]
            column = mx.array(at, dtype=mx.int32)[:, None, None, None]
            self._positions[key] = mx.broadcast_to(column, (self._all, heads, 1, dim))
        return self._positions[key]

    def mask(self, ring: int | None, window: int | None) -> mx.array | None:
        """Which stored positions the new tokens see.

        Args:
            ring: tokens the layer keeps at most (position p % ring); None keeps all.
            window: tokens, the new one included, that attention may look back; None is all that are kept.
        """
        if window is not None and (window >= self.longest or (ring is not None and window >= ring)):
            window = None
        if (ring, window) not in self._masks:
            self._masks[ring, window] = self._mask(ring, window)
        return self._masks[ring, window]

    def _mask(self, ring: int | None, window: int | None) -> mx.array | None:
        after = [length + 1 for length in self.lengths]
        held = after if ring is None else [min(length, ring) for length in after]
        if window is None and len(set(held)) == 1:
            return None
        width = max(held)
        by_slot = [1] * self.used
        for slot, length in zip(self.seats, after, strict=True):
            by_slot[slot] = length
        return visible(mx.array(by_slot, dtype=mx.int32), width, ring, window)


class DecodeStep:
    """One step of a batch: `offsets` and the cohorts, in batch order (the order of `layout.rows`)."""

    def __init__(self, layout: CohortLayout) -> None:
        self.cohorts: list[CohortStep] = []
        start = 0
        for cohort in layout.cohorts.values():
            step = CohortStep(cohort, start, layout.lengths)
            self.cohorts.append(step)
            start = step.stop
        self.rows = start
        self.lengths: Sequence[int] = [n for step in self.cohorts for n in step.lengths]


def visible(lengths: mx.array, width: int, ring: int | None, window: int | None) -> mx.array:
    """Which of `width` stored positions the last token of each slot sees, `[slots, 1, 1, width]`.

    Args:
        lengths: int32 `[slots]`, tokens held, that token included.
        ring, window: as `CohortStep.mask` takes them.
    """
    lengths = lengths[:, None, None, None]
    index = mx.arange(width, dtype=mx.int32)
    token = index if ring is None else lengths - 1 - (lengths - 1 - index) % ring
    seen = (token >= 0) & (token < lengths)
    return seen if window is None else seen & (token >= lengths - window)
