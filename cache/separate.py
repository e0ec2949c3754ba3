"""Rows that keep caches of their own while the rest of the model runs on all of them at once.

For families whose attention cannot tell several rows apart (chunked caches, keys chosen by block) or whose
caches are of a kind of their own. A decode row is then a span of one token: attention runs row by row, on
the row's own cache, and everything else (projections of experts and MLPs, most of the weights) on the whole
step. A row that joins or leaves copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from chairlift.cache.attention import CohortKV
from chairlift.cache.kinds import Kind, kind_of
from chairlift.cache.layout import CohortLayout
from chairlift.cache.parts import Attention, by_parts
from chairlift.cache.step import CohortStep, DecodeStep
from chairlift.cache.views import AttendView, SeamMask, SpanStep, ViewList


class PartsView:
    """A layer whose cache only the model's own attention knows.

    Args:
        offset: int32 `[tokens]`, as of `AttendView`.
        spans: the rows of the step, with this layer's cache of each.
        padding: tokens at the end of the step that belong to nobody.
    """

    def __init__(self, offset: mx.array, spans: Sequence[tuple[SpanStep, Any]], padding: int = 0) -> None:
        self.offset = offset
        self.padding = padding
        self.cohorts: Sequence[CohortStep] = ()
        self.spans = spans

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> SeamMask:
        return SeamMask(window_size, return_array)

    def by_parts(
        self, attention: Attention, mask: Any, arrays: Sequence[mx.array], *, alone: bool = False
    ) -> mx.array:
        """See `chairlift.cache.parts.by_parts`."""
        mask = SeamMask() if mask is None else mask
        return by_parts([self], lambda caches: caches[0], attention, mask, arrays, alone)


class SeparateRows:
    """The moving batch of such rows; the interface that the runner uses of `RowBatch`.

    Args:
        template: fresh caches of the model, to learn the kind of each layer.

    Raises:
        ValueError: a recurrent layer.
    """

    has_recurrent = False

    def __init__(self, template: Sequence[Any]) -> None:
        if any(kind_of(cache) is Kind.RECURRENT for cache in template):
            raise ValueError("Recurrent layers have no rows of their own.")
        self.order: list[int] = []
        self._kinds = list(template)
        self._caches: dict[int, Sequence[Any]] = {}
        self._lengths: dict[int, int] = {}

    def change(
        self,
        *,
        leave: Iterable[int] = (),
        join: Mapping[int, tuple[Sequence[Any], int]] | None = None,
    ) -> None:
        """Rows leave, then rows join with their caches and the number of tokens these hold."""
        for row in leave:
            self._caches.pop(row, None)
            self._lengths.pop(row, None)
        for row, (caches, held) in (join or {}).items():
            self._caches[row], self._lengths[row] = caches, held
        self.order = list(self._caches)

    def own(self, row: int) -> Sequence[Any]:
        """The row's caches."""
        return self._caches[row]

    def begin(self) -> DecodeStep:
        """The geometry of the step: no cohorts."""
        step = DecodeStep(CohortLayout())
        step.lengths = [self._lengths[row] for row in self.order]
        return step

    def caches(
        self,
        step: DecodeStep | None,
        offset: mx.array,
        spans: Sequence[tuple[SpanStep, Sequence[Any]]] = (),
        padding: int = 0,
    ) -> list[Any]:
        """The caches to call the model with for one step of all rows (none without `step`), `spans` and
        `padding`."""
        rows = self.order if step is not None else []
        everything = [
            *((SpanStep(at, at + 1, self._lengths[row]), self._caches[row]) for at, row in enumerate(rows)),
            *spans,
        ]
        return [
            _view(kind, offset, [(span, caches[layer]) for span, caches in everything], padding)
            for layer, kind in enumerate(self._kinds)
        ]

    def end(self) -> None:
        """Every row has appended its token."""
        for row in self.order:
            self._lengths[row] += 1

    def clear(self) -> None:
        self.change(leave=list(self.order))

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for caches in self._caches.values() for cache in caches)

    @property
    def held_nbytes(self) -> int:
        """The rows' buffers grow as they do: what is allocated is theirs."""
        return self.nbytes


def _view(kind: Any, offset: mx.array, spans: Sequence[tuple[SpanStep, Any]], padding: int) -> Any:
    match kind_of(kind):
        case Kind.NESTED:
            parts = [
                _view(part, offset, [(span, cache.caches[at]) for span, cache in spans], padding)
                for at, part in enumerate(kind.caches)
            ]
            return ViewList(*parts)
        case Kind.FULL:
            return AttendView(CohortKV(), None, offset, spans, padding)
        case Kind.ROTATING:
            return AttendView(CohortKV(window=kind.max_size), None, offset, spans, padding)
    return PartsView(offset, spans, padding)
