"""A decode step as a function of arrays alone, which `mx.compile` traces once and repeats.

Of what a step depends on, all that changes from step to step goes in as arrays: tokens, planes, and the
numbers of `CohortStep` in one array. The rest is its `Shape`. While the function is traced the model sees the
same views as ever, over stand-ins for the storage and the geometry: whoever asks these for a number that is
not in the shape would have it in the trace for good, and gets an error.

All methods run on the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from chairlift.cache.attention import Block, CohortKV
from chairlift.cache.batch import RowBatch
from chairlift.cache.parts import Attention
from chairlift.cache.step import CohortShape, CohortStep, DecodeStep, visible
from chairlift.cache.views import AttendView

Shape = tuple[CohortShape, ...]
"""Of a step, by cohort."""
Decode = Callable[[mx.array, mx.array, list[list[mx.array]]], tuple[mx.array, list[list[mx.array]]]]
"""(tokens int32 `[rows]`, `numbers_of` the step, the planes of each cohort in each layer) -> (logits
`[rows, vocab]`, the planes with the tokens stored)."""


class NotTraceable(RuntimeError):
    """The model asked for a number that changes from step to step."""


def stores_of(batch: RowBatch) -> list[CohortKV] | None:
    """The layers of a batch whose steps are functions of arrays: each is attention over keys and values as
    they are. None for any other."""
    stores = [tree for tree in batch.trees if type(tree) is CohortKV]
    return stores if len(stores) == len(batch.trees) and stores and not batch.dense else None


def shape_of(step: DecodeStep) -> Shape:
    return tuple(cohort.shape for cohort in step.cohorts)


def numbers_of(step: DecodeStep) -> mx.array:
    """int32, of all cohorts: the rows' lengths in batch order, then each cohort's own."""
    own = [number for cohort in step.cohorts for number in cohort.numbers]
    return mx.array([*step.lengths, *own], dtype=mx.int32)


def decode_function(forward: Callable[..., mx.array], stores: Sequence[CohortKV], shape: Shape) -> Decode:
    """The step of a batch with such layers, for steps of this shape.

    Args:
        forward: tokens `[rows, 1]` and caches -> logits `[rows, 1, vocab]`.
        stores: only what they are counts, not what they hold.
    """
    kinds = [(store.window, store.single) for store in stores]

    def decode(
        tokens: mx.array, numbers: mx.array, planes: list[list[mx.array]]
    ) -> tuple[mx.array, list[list[mx.array]]]:
        step = TracedStep(shape, numbers)
        layers = [CohortKV(window, single) for window, single in kinds]
        given = iter(planes)
        for layer in layers:
            layer.blocks = {cohort.key: _block(next(given), cohort.shape) for cohort in step.cohorts}
        logits = forward(tokens[:, None], [TracedView(layer, step, step.offset) for layer in layers])
        return logits[:, -1], [block.planes for layer in layers for block in layer.blocks.values()]

    return decode


def run(decode: Decode, stores: Sequence[CohortKV], step: DecodeStep, tokens: mx.array) -> mx.array | None:
    """One step of a batch, as `decode` has it: logits `[rows, vocab]`. None where a cohort has no planes yet.

    When this returns, nothing but the new planes refers to the old ones, which are so written in place.
    """
    blocks = [store.blocks[cohort.key] for store in stores for cohort in step.cohorts]
    if not all(block.planes for block in blocks):
        return None
    logits, planes = decode(tokens, numbers_of(step), [block.planes for block in blocks])
    for block, new in zip(blocks, planes, strict=True):
        block.planes = new
    return logits


class TracedCohort(CohortStep):
    """A cohort in a step whose numbers are arrays. Every slot counts as used, up to the whole capacity.

    Args:
        key: its index among the cohorts.
        start: of its rows in the batch.
        numbers: `CohortStep.numbers`.
    """

    def __init__(self, key: int, start: int, shape: CohortShape, numbers: mx.array) -> None:
        rows, slots, capacity = self.shape = shape
        self.key, self.start, self.stop = key, start, start + rows
        self.used, self.longest, self.holes = slots, capacity, slots > rows
        self.uniform = None
        self.known = {}
        self.slots, lengths, self._at, self.fill = mx.split(numbers, [rows, 2 * rows, 2 * rows + slots])
        self.held = lengths + 1
        self._masks, self._positions = {}, {}

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(f"`{name}` of a cohort changes from step to step.")

    def by_slot(self, rows: mx.array) -> mx.array:
        return rows[self.fill] if self.holes else rows

    def positions(self, ring: int | None, heads: int, dim: int) -> mx.array:
        key = (ring, heads, dim)
        if key not in self._positions:
            at = self._at if ring is None else self._at % ring
            column = at[:, None, None, None]
            self._positions[key] = mx.broadcast_to(column, (self.used, heads, 1, dim))
        return self._positions[key]

    def mask(self, ring: int | None, window: int | None) -> mx.array | None:
        if window is not None and ring is not None and window >= ring:
            window = None
        if (ring, window) not in self._masks:
            width = self.longest if ring is None else min(self.longest, ring)
            self._masks[ring, window] = visible(self._at + 1, width, ring, window)
        return self._masks[ring, window]


class TracedStep(DecodeStep):
    """Args: the shape, and `numbers_of` a step.

    Attributes:
        offset: int32 `[rows]`, what each row held before.
    """

    def __init__(self, shape: Shape, numbers: mx.array) -> None:
        self.rows = sum(cohort.rows for cohort in shape)
        self.offset = numbers[: self.rows]
        self.cohorts = list(_cohorts(shape, numbers[self.rows :]))

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(f"`{name}` of a step changes from one to the next.")


class TracedView(AttendView):
    """A layer's view in a traced step. Attention by the model's own code is left out: it may count keys."""

    def by_parts(
        self, attention: Attention, mask: Any, arrays: Sequence[mx.array], *, alone: bool = False
    ) -> mx.array:
        raise NotTraceable("This attention is computed by the model's own code.")


def _cohorts(shape: Shape, numbers: mx.array) -> Iterator[TracedCohort]:
    start = at = 0
    for key, cohort in enumerate(shape):
        count = 2 * (cohort.rows + cohort.slots)
        yield TracedCohort(key, start, cohort, numbers[at : at + count])
        start, at = start + cohort.rows, at + count


def _block(planes: list[mx.array], shape: CohortShape) -> Block:
    block = Block(shape.slots, planes[0].shape[2])
    block.planes = planes
    return block
