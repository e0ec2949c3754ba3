"""A decode step as a function of arrays alone, which `mx.compile` traces once and repeats.

It computes every slot of every cohort, free ones included, so that nothing in it depends on which slots rows
sit in: all that changes from step to step goes in as arrays, which are the tokens and the lengths by slot and
the planes. The rest is its `Shape`. A free slot takes some row's token as the first of its own: it writes
position 0, which whoever takes the slot overwrites, and sees that position alone. What it computes is
dropped; a model's other rows do not depend on it.

While the function is traced the model sees the same views as ever, over stand-ins for the storage and the
geometry: whoever asks these for a number that is not in the shape would have it in the trace for good, and
gets an error.

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
"""(tokens int32 `[slots]`, tokens held before int32 `[slots]`, the planes of each cohort in each layer) ->
(logits `[slots, vocab]`, the planes with the tokens stored). Slots are those of all cohorts, in order."""


class NotTraceable(RuntimeError):
    """The model asked for a number that changes from step to step."""


def stores_of(batch: RowBatch) -> list[CohortKV] | None:
    """The layers of a batch whose steps are functions of arrays: each is attention over keys and values as
    they are. None for any other."""
    stores = [tree for tree in batch.trees if type(tree) is CohortKV]
    return stores if len(stores) == len(batch.trees) and stores and not batch.dense else None


def shape_of(step: DecodeStep) -> Shape:
    return tuple(cohort.shape for cohort in step.cohorts)


def slots_of(shape: Shape) -> int:
    """Slots that a step of this shape computes."""
    return sum(cohort.slots for cohort in shape)


def held_of(step: DecodeStep) -> mx.array:
    """int32 `[slots]`: tokens that each slot of each cohort holds before the step."""
    return mx.array([held for cohort in step.cohorts for held in cohort.held_by_slot], dtype=mx.int32)


def decode_function(forward: Callable[..., mx.array], stores: Sequence[CohortKV], shape: Shape) -> Decode:
    """The step of a batch with such layers, for steps of this shape.

    Args:
        forward: tokens `[slots, 1]` and caches -> logits `[slots, 1, vocab]`.
        stores: only what they are counts, not what they hold.
    """
    kinds = [(store.window, store.single) for store in stores]

    def decode(
        tokens: mx.array, held: mx.array, planes: list[list[mx.array]]
    ) -> tuple[mx.array, list[list[mx.array]]]:
        step = TracedStep(shape, held)
        layers = [CohortKV(window, single) for window, single in kinds]
        given = iter(planes)
        for layer in layers:
            layer.blocks = {cohort.key: _block(next(given), cohort.shape) for cohort in step.cohorts}
        logits = forward(tokens[:, None], [TracedView(layer, step, step.offset) for layer in layers])
        return logits[:, -1], [block.planes for layer in layers for block in layer.blocks.values()]

    return decode


def run(decode: Decode, stores: Sequence[CohortKV], step: DecodeStep, tokens: mx.array) -> mx.array | None:
    """One step of a batch, as `decode` has it: tokens int32 `[rows]` -> logits `[rows, vocab]`. None where a
    cohort has no planes yet.

    When this returns, nothing but the new planes refers to the old ones, which are so written in place.
    """
    blocks = [store.blocks[cohort.key] for store in stores for cohort in step.cohorts]
    if not all(block.planes for block in blocks):
        return None
    by_slot = [row for cohort in step.cohorts for row in cohort.rows_by_slot]
    full = len(by_slot) == step.rows
    logits, planes = decode(
        tokens if full else tokens[mx.array(by_slot, dtype=mx.int32)],
        held_of(step),
        [block.planes for block in blocks],
    )
    for block, new in zip(blocks, planes, strict=True):
        block.planes = new
    return logits if full else logits[mx.array(list(_places(step)), dtype=mx.int32)]


def _places(step: DecodeStep) -> Iterator[int]:
    """Of each row of the batch among the slots of all cohorts."""
    first = 0
    for cohort in step.cohorts:
        yield from (first + seat for seat in cohort.seats)
        first += cohort.shape.slots


class TracedCohort(CohortStep):
    """A cohort in a step whose numbers are arrays: slot n is row n, and may hold up to the whole capacity.

    Args:
        key: its index among the cohorts.
        start: of its slots among those of all cohorts.
        before: int32 `[slots]`, tokens held before the step.
    """

    def __init__(self, key: int, start: int, shape: CohortShape, before: mx.array) -> None:
        self.shape = shape
        self.key, self.start, self.stop = key, start, start + shape.slots
        self.used, self.longest = shape
        self.holes = False
        self.uniform = None
        self.known = {}
        self.slots = mx.array(list(range(shape.slots)), dtype=mx.int32)
        self.held = before + 1
        self._before = before
        self._masks, self._positions = {}, {}

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(f"`{name}` of a cohort changes from step to step.")

    def by_slot(self, rows: mx.array) -> mx.array:
        return rows

    def positions(self, ring: int | None, heads: int, dim: int) -> mx.array:
        key = (ring, heads, dim)
        if key not in self._positions:
            at = self._before if ring is None else self._before % ring
            column = at[:, None, None, None]
            self._positions[key] = mx.broadcast_to(column, (self.used, heads, 1, dim))
        return self._positions[key]

    def mask(self, ring: int | None, window: int | None) -> mx.array | None:
        if window is not None and ring is not None and window >= ring:
            window = None
        if (ring, window) not in self._masks:
            width = self.longest if ring is None else min(self.longest, ring)
            self._masks[ring, window] = visible(self.held, width, ring, window)
        return self._masks[ring, window]


class TracedStep(DecodeStep):
    """Args: the shape, and `held_of` a step.

    Attributes:
        offset: int32 `[slots]`, what each slot held before.
    """

    def __init__(self, shape: Shape, held: mx.array) -> None:
        self.rows = slots_of(shape)
        self.offset = held
        self.cohorts = list(_cohorts(shape, held))

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(f"`{name}` of a step changes from one to the next.")


class TracedView(AttendView):
    """A layer's view in a traced step. Attention by the model's own code is left out: it may count keys."""

    def by_parts(
        self, attention: Attention, mask: Any, arrays: Sequence[mx.array], *, alone: bool = False
    ) -> mx.array:
        raise NotTraceable("This attention is computed by the model's own code.")


def _cohorts(shape: Shape, held: mx.array) -> Iterator[TracedCohort]:
    start = 0
    for key, cohort in enumerate(shape):
        stop = start + cohort.slots
        yield TracedCohort(key, start, cohort, held[start:stop])
        start = stop


def _block(planes: list[mx.array], shape: CohortShape) -> Block:
    block = Block(shape.slots, planes[0].shape[2])
    block.planes = planes
    return block
