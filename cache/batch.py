"""The moving batch: model state of all rows that decode, joined and left row by row.

`RowBatch` holds one storage per layer (attention in cohorts, recurrent states stacked) over one shared
`CohortLayout`. Rows are addressed by id. The verbs are mlx-lm's: `merge`, `extract`, `filter`, `extend`; in
the running server rows `join` and `leave` one by one, which costs copies of their own state, of the cohort
joined where it must grow, and, for recurrent layers only, of states that every step rewrites anyway.

All methods run on the MLX thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

from chairlift.cache.attention import CohortKV, Planes
from chairlift.cache.device import on_cuda
from chairlift.cache.kinds import Kind, kind_of
from chairlift.cache.layout import FLOOR, CohortLayout, Drop, Move, Rebuild
from chairlift.cache.mamba import BatchMambaCache
from chairlift.cache.quantized import QuantizedKV, QuantizedRow
from chairlift.cache.step import DecodeStep
from chairlift.cache.views import AttendView, DenseView, SpanStep, ViewList

COPY_BYTES = 64 * 2**20
"""Of cohorts that are there twice at most while they are rebuilt, beyond one layer's."""

Caches = Sequence[Any]
"""One request's caches as the model's `make_cache` gives them, one per layer, batch 1."""


class UnsupportedCache(ValueError):
    """A cache type that cannot share a batch; its model is served one row at a time."""


class RecurrentLayer:
    """Recurrent states of all rows, `[rows, *state]`, in batch order."""

    def __init__(self, size: int, single: type[Any] = ArraysCache) -> None:
        self.size = size
        self.cache: BatchMambaCache | None = None
        self._single = single

    def arrange(self, keep: Sequence[int], joined: Sequence[Any]) -> None:
        """Keep the rows at the old positions `keep`, in that order, then append `joined`."""
        kept = self.cache
        if kept is not None:
            if not keep:
                kept = None
            elif list(keep) != list(range(kept.batch_size)):
                kept.filter(list(keep))
        if joined:
            new = BatchMambaCache.merge([_one_row(cache) for cache in joined])
            if kept is None:
                kept = new
            else:
                kept.extend(new)
        self.cache = kept

    def extract(self, index: int) -> Any:
        assert self.cache is not None
        return self.restored(self.cache.extract(index).cache)

    def restored(self, arrays: Sequence[mx.array | None]) -> Any:
        """A single request's cache that holds these states."""
        single = self._single(self.size)
        single.cache = list(arrays)
        return single

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes if self.cache is not None else 0

    @property
    def buffers(self) -> int:
        """Arrays."""
        return sum(state is not None for state in self.cache.cache) if self.cache is not None else 0


Layer = CohortKV | RecurrentLayer
Tree = Any
"""A `Layer`, or a `Nest` of trees where the model nests caches in a CacheList."""


class Nest(tuple[Tree, ...]):
    """Storage of caches that a model nests in one."""

    single: type[Any]
    """The class of one request's nest."""

    def __new__(cls, single: type[Any], trees: Iterable[Tree]) -> Nest:
        nest = super().__new__(cls, trees)
        nest.single = single
        return nest


class RowBatch:
    """Model state of the rows in a batch.

    Args:
        template: fresh caches of the model (`make_cache()`), to learn the kind of each layer.
        dense: keep attention rows in one block and show models whole arrays (`DenseView`).
        floor: of `CohortLayout`, None for the usual one.

    Attributes:
        trees: storage by layer.

    Raises:
        UnsupportedCache: naming a cache type that cannot be batched.
    """

    def __init__(self, template: Caches, *, dense: bool = False, floor: int | None = None) -> None:
        if floor is None:
            # A launch costs more on CUDA, and the ragged kernel reads no padding.
            floor = 2 * FLOOR if on_cuda() else FLOOR
        self.layout = CohortLayout(single=dense, floor=floor)
        self.dense = dense
        self.order: list[int] = []
        self.trees: list[Tree] = [storage_of(cache) for cache in template]
        leaves = list(leaves_of(self.trees))
        self._attention = [leaf for leaf in leaves if isinstance(leaf, CohortKV)]
        self._recurrent = [leaf for leaf in leaves if isinstance(leaf, RecurrentLayer)]

    @classmethod
    def merge(cls, template: Caches, rows: Mapping[int, Caches], *, dense: bool = False) -> RowBatch:
        """A batch of the given rows, in order."""
        batch = cls(template, dense=dense)
        batch.change(join={row: (caches, tokens_held(caches)) for row, caches in rows.items()})
        return batch

    @property
    def has_recurrent(self) -> bool:
        return bool(self._recurrent)

    def change(
        self,
        *,
        leave: Iterable[int] = (),
        join: Mapping[int, tuple[Caches, int]] | None = None,
    ) -> None:
        """Rows leave, then rows join with their caches and the number of tokens these hold.

        Afterwards `order` is the new batch order. Unknown leavers are ignored.
        """
        join = join or {}
        old = {row: index for index, row in enumerate(self.order)}
        gone = [row for row in leave if row in old]
        for row in gone:
            self._apply(self.layout.leave(row))
        self._apply(self.layout.join((row, held) for row, (_, held) in join.items()))
        for row, (caches, _) in join.items():
            place = self.layout.places[row]
            for store, cache in self._pairs(caches, CohortKV):
                store.write(place, cache)
        if gone or join:
            self._reorder(old, join)

    def filter(self, rows: Iterable[int]) -> None:
        """Keep just these rows."""
        kept = set(rows)
        self.change(leave=[row for row in self.order if row not in kept])

    def extend(self, other: RowBatch) -> None:
        """Take over all rows of `other`, a batch of the same model."""
        self.change(join={row: (other.extract(row), other.layout.lengths[row]) for row in other.order})

    def extract(self, row: int) -> list[Any]:
        """The row's caches as a solo run would hold them, in memory of their own."""
        return [self._single(tree, row) for tree in self.trees]

    def _single(self, tree: Tree, row: int) -> Any:
        if isinstance(tree, CohortKV):
            return tree.read(self.layout.places[row], self.layout.lengths[row])
        if isinstance(tree, RecurrentLayer):
            return tree.extract(self.order.index(row))
        return tree.single(*(self._single(part, row) for part in tree))

    def planes(self, row: int, start: int, stop: int) -> list[Planes]:
        """Views of the row's tokens [start, stop) in every layer that keeps all tokens."""
        place = self.layout.places[row]
        return [store.part(place, start, stop) for store in self._attention if store.window is None]

    def states(self, row: int) -> list[Any]:
        """The row's caches, in memory of their own, of every layer that keeps a state or a window."""
        return [self._single(leaf, row) for leaf in leaves_of(self.trees) if is_stateful(leaf)]

    def begin(self) -> DecodeStep:
        """Make room for one more token of every row; the geometry of the step. `order` changes where a row
        moves to another cohort."""
        before = self.layout.rows
        self._apply(self.layout.make_room(list(self.order)))
        if self.layout.rows != before:
            self._reorder({row: index for index, row in enumerate(self.order)}, {})
        return DecodeStep(self.layout)

    def caches(
        self,
        step: DecodeStep | None,
        offset: mx.array,
        spans: Sequence[tuple[SpanStep, Caches]] = (),
        padding: int = 0,
    ) -> list[Any]:
        """The caches to call the model with for one step of all rows (and `spans` and `padding`, for flat
        families)."""
        return [
            self._view(tree, [(span, caches[i]) for span, caches in spans], step, offset, padding)
            for i, tree in enumerate(self.trees)
        ]

    def _view(
        self,
        tree: Tree,
        rows: Sequence[tuple[SpanStep, Any]],
        step: DecodeStep | None,
        offset: mx.array,
        padding: int,
    ) -> Any:
        # A method and no function inside `caches`: one that calls itself is a cycle of references, and holds
        # a step's arrays until Python's collector comes by.
        if isinstance(tree, RecurrentLayer):
            if tree.cache is None:
                tree.cache = BatchMambaCache(size=tree.size)
            return tree.cache
        if isinstance(tree, CohortKV):
            if self.dense:
                assert step is not None
                return DenseView(tree, step, offset)
            return AttendView(tree, step, offset, rows, padding)
        parts = (
            self._view(part, [(span, cache.caches[i]) for span, cache in rows], step, offset, padding)
            for i, part in enumerate(tree)
        )
        return ViewList(*parts)

    def end(self) -> None:
        """Every row has appended its token."""
        self.layout.advance(self.order)

    def clear(self) -> None:
        """Drop every row and its memory."""
        self.change(leave=list(self.order))

    def arrays(self) -> list[mx.array]:
        """Every array that holds state, to evaluate."""
        found = [
            plane for store in self._attention for block in store.blocks.values() for plane in block.planes
        ]
        for layer in self._recurrent:
            if layer.cache is not None:
                found += [array for array in layer.cache.cache if array is not None]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all rows, padding included."""
        return sum(leaf.nbytes for leaf in leaves_of(self.trees))

    @property
    def buffers(self) -> int:
        """Arrays of all rows."""
        return sum(leaf.buffers for leaf in leaves_of(self.trees))

    @property
    def held_nbytes(self) -> int:
        """Bytes that the rows' own tokens and states need of `nbytes`."""
        total = sum(layer.nbytes for layer in self._recurrent)
        for store in self._attention:
            lengths = self.layout.lengths.values()
            kept = sum(n if store.window is None else min(n, store.window) for n in lengths)
            total += kept * store.bytes_per_token
        return total

    def _apply(self, actions: Sequence[Rebuild | Move | Drop]) -> None:
        """Cohorts that are rebuilt are there twice until that is computed: not all layers at once, where
        they are large."""
        if not actions:
            return
        rebuilt = [action.key for action in actions if isinstance(action, Rebuild)]
        pending: list[mx.array] = []
        for store in self._attention:
            store.apply(actions)
            pending += [plane for key in rebuilt if key in store.blocks for plane in store.blocks[key].planes]
            if sum(plane.nbytes for plane in pending) > COPY_BYTES:
                mx.eval(pending)
                pending.clear()
        moved = {action.target[0] for action in actions if isinstance(action, Move)}
        late = [store for store in self._attention if store.stores_late] if moved else []
        if late:
            # Before attention stores something in the place that was left.
            blocks = [store.blocks[key] for store in late for key in moved if key in store.blocks]
            mx.async_eval([block.planes for block in blocks])  # type: ignore[no-untyped-call]

    def _reorder(self, old: Mapping[int, int], join: Mapping[int, tuple[Caches, int]]) -> None:
        self.order = self.layout.rows
        if not self._recurrent:
            return
        kept = [row for row in self.order if row in old and row not in join]
        joined = [row for row in self.order if row in join]
        final = {row: index for index, row in enumerate([*kept, *joined])}
        wanted = [final[row] for row in self.order]
        singles = {row: list(self._pairs(caches, RecurrentLayer)) for row, (caches, _) in join.items()}
        for index, layer in enumerate(self._recurrent):
            layer.arrange([old[row] for row in kept], [singles[row][index][1] for row in joined])
            if wanted != list(range(len(wanted))):
                layer.arrange(wanted, [])

    def _pairs(self, caches: Caches, kind: type[Any]) -> Iterable[tuple[Any, Any]]:
        """(storage, the row's own cache) of every layer of a kind."""
        return paired(self.trees, caches, kind)


def is_stateful(layer: Layer) -> bool:
    """The layer keeps a state or a window, not every token."""
    return isinstance(layer, RecurrentLayer) or layer.window is not None


def paired(trees: Iterable[Tree], caches: Caches, kind: type[Any] | UnionType) -> Iterable[tuple[Any, Any]]:
    """(storage, a request's own cache) of every layer of a kind."""
    for tree, cache in zip(trees, caches, strict=True):
        if isinstance(tree, tuple):
            yield from paired(tree, cache.caches, kind)
        elif isinstance(tree, kind):
            yield tree, cache


def tokens_held(caches: Caches) -> int:
    """Tokens that a row's attention caches hold; 0 for a model without attention."""
    held = 0
    for cache in caches:
        kind = kind_of(cache)
        if kind is Kind.NESTED:
            held = max(held, tokens_held(cache.caches))
        elif kind in (Kind.FULL, Kind.ROTATING) or isinstance(cache, QuantizedRow | QuantizedKVCache):
            held = max(held, int(cache.offset))
    return held


def storage_of(cache: Any) -> Tree:
    """Storage for what a single request's cache holds.

    Raises:
        UnsupportedCache: naming a cache type that cannot be batched.
    """
    if isinstance(cache, QuantizedRow):
        return QuantizedKV(cache)
    match kind_of(cache):
        case Kind.FULL:
            return CohortKV(single=type(cache))
        case Kind.ROTATING if cache.keep:
            raise UnsupportedCache("A rotating cache that keeps its first tokens cannot share a batch.")
        case Kind.ROTATING:
            return CohortKV(window=cache.max_size, single=type(cache))
        case Kind.RECURRENT:
            return RecurrentLayer(len(cache.cache), type(cache))
        case Kind.NESTED:
            return Nest(type(cache), (storage_of(part) for part in cache.caches))
    raise UnsupportedCache(f"A cache of type {type(cache).__name__} cannot share a batch.")


def leaves_of(trees: Iterable[Tree]) -> Iterable[Layer]:
    """Every layer's storage, in order."""
    for tree in trees:
        if isinstance(tree, tuple):
            yield from leaves_of(tree)
        else:
            yield tree


def _one_row(cache: Any) -> ArraysCache:
    """States alone: not yet written, it is still one row, which `BatchMambaCache` would not know."""
    row = ArraysCache(len(cache.cache))
    row.cache = list(cache.cache)
    return row
