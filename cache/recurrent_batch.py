"""Recurrent states in a batch.

mlx-lm 0.32.2 has `ArraysCache` (once `MambaCache`), which can already be merged, filtered, extended and
extracted. What it gets wrong there, each a test in tests/cache/test_mamba.py:

- `extract` raises on a state that is not written yet, drops padding and lengths, and returns a slice that
  keeps the whole batch's buffer alive until it is evaluated;
- `merge` drops padding and lengths, takes the first cache's number of states and the first dtype for all,
  calls every cache one row, and raises IndexError on an empty list;
- `extend` gives a row without lengths the length 0, so that all its tokens are masked;
- `filter` raises on an empty list, and reads foreign memory for a row that is not there;
- `advance` subtracts from lazy arrays. In decoding nothing evaluates them except in the one layer whose
  mask is used, so the graph of every other layer grows by a node a step.

Padding and lengths are plain numbers on the host here: no graph grows and no device read is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

UNBOUNDED = 2**31 - 1
"""The length of a row all of whose coming tokens are real, where an array needs a number."""


def _host(values: mx.array | Sequence[int] | None) -> list[int] | None:
    """Numbers on the host. Reads the device when given an array."""
    if values is None:
        return None
    numbers: Any = values.tolist() if isinstance(values, mx.array) else values
    return [int(number) for number in numbers]


class BatchMambaCache(ArraysCache):  # type: ignore[misc]
    """`size` state arrays of a recurrent layer, `[rows, ...]` each, or None while not yet written.

    Takes the place of `mlx_lm.models.cache.ArraysCache` in any model.

    Left padding is the number of coming tokens of a row that are padding, before its real ones (zero or
    less: none are left). A length is the number of coming tokens of a row that are real, counted from
    the next one; a row without one is `UNBOUNDED`. `advance` lowers both.

    Args:
        left_padding: one number a row; with it the number of rows is known before the first write.
        size: number of states.
    """

    def __init__(self, left_padding: list[int] | None = None, size: int = 2) -> None:
        self._clear()
        super().__init__(size)
        if left_padding is not None:
            self.left_padding = left_padding
            self._rows = len(left_padding)

    def _clear(self) -> None:
        self._rows = 0
        self._left_padding: list[int] | None = None
        self._lengths: list[int] | None = None
        self._arrays: dict[str, mx.array] = {}

    @classmethod
    def from_state(cls, state: Any) -> BatchMambaCache:
        """The cache whose `.state` is `state`."""
        cache = cls(size=len(state[0]))
        cache.state = state
        return cache

    # Rows and metadata

    @property
    def batch_size(self) -> int:
        """Rows. 0 for a cache that nobody told its rows (`ArraysCache` says 1)."""
        for state in self.cache:
            if state is not None:
                return int(state.shape[0])
        return self._rows

    def _array(self, name: str, values: list[int] | None) -> mx.array | None:
        if values is None:
            return None
        if name not in self._arrays:
            self._arrays[name] = mx.array(values, dtype=mx.int32)
        return self._arrays[name]

    def _checked(self, name: str, values: mx.array | Sequence[int] | None) -> list[int] | None:
        self._arrays.pop(name, None)
        numbers = _host(values)
        if numbers is not None:
            rows = self.batch_size or len(numbers)
            if len(numbers) != rows:
                raise ValueError(f"{name} has {len(numbers)} entries, the batch has {rows} rows")
            self._rows = rows
        return numbers

    @property
    def left_padding(self) -> mx.array | None:
        """int32 `[rows]`, or None. Built from host numbers, so never a graph. Settable from an array
        (which reads the device) or a list; ValueError unless it has one entry a row."""
        return self._array("left_padding", self._left_padding)

    @left_padding.setter
    def left_padding(self, values: mx.array | Sequence[int] | None) -> None:
        self._left_padding = self._checked("left_padding", values)

    @property
    def lengths(self) -> mx.array | None:
        """int32 `[rows]`, or None; as `left_padding`."""
        return self._array("lengths", self._lengths)

    @lengths.setter
    def lengths(self, values: mx.array | Sequence[int] | None) -> None:
        self._lengths = self._checked("lengths", values)

    @property
    def state(self) -> tuple[list[mx.array | None], mx.array | None, mx.array | None]:
        """`(states, left_padding, lengths)`. Where nothing is written and no padding is set, a left
        padding of zeros carries the number of rows."""
        padding = self.left_padding
        rows = self.batch_size
        if padding is None and rows and all(state is None for state in self.cache):
            padding = mx.zeros((rows,), dtype=mx.int32)
        return self.cache, padding, self.lengths

    @state.setter
    def state(self, value: Any) -> None:
        states, left_padding, lengths = value
        self._clear()
        self.cache = list(states)
        self.left_padding = left_padding
        self.lengths = lengths

    def empty(self) -> bool:
        """Nothing is written."""
        return all(state is None for state in self.cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the states written."""
        return sum(state.nbytes for state in self.cache if state is not None)

    # Steps

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce tokens `[rows, tokens]` of which some are padding: on the left by `left_padding`
        (which `ArraysCache` ignores), on the right beyond `lengths`. `right_padding` is for attention.
        """
        if left_padding is not None:
            self.left_padding = left_padding
        if lengths is not None:
            self.lengths = lengths

    def finalize(self) -> None:
        """The announced tokens are over: forget padding and lengths."""
        self._rows = self.batch_size
        self.left_padding = None
        self.lengths = None

    def advance(self, n: int) -> None:
        """`n` tokens of every row have gone through."""
        self._arrays.clear()
        if self._lengths is not None:
            self._lengths = [x if x >= UNBOUNDED else x - n for x in self._lengths]
        if self._left_padding is not None:
            self._left_padding = [x - n for x in self._left_padding]

    def make_mask(self, n: int) -> mx.array | None:
        """bool `[rows, n]`, True where a token is real; None where padding and lengths are not set."""
        left_padding, lengths = self.left_padding, self.lengths
        position = mx.arange(n)
        mask = None
        if left_padding is not None:
            mask = position >= left_padding[:, None]
        if lengths is not None:
            real = position < lengths[:, None]
            mask = real if mask is None else mask & real
        return mask

    # What mlx-vlm's models call

    def update_window(
        self, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None
    ) -> mx.array:
        """Keep the last `width` positions of `source` `[rows, width + tokens, ...]` as state `index`; with
        lengths `[rows]`, those that end with each row's last real token."""
        tokens = source.shape[1] - width
        if lengths is None:
            state = mx.contiguous(source[:, tokens:])
        else:
            positions = mx.clip(lengths, 0, tokens)[:, None] + mx.arange(width)
            state = mx.take_along_axis(
                source, positions.reshape(*positions.shape, *[1] * (source.ndim - 2)), axis=1
            )
        self.cache[index] = state
        return state

    def update_recurrent(self, index: int, length: int, update: Any) -> tuple[mx.array, mx.array]:
        """State `index` after `length` tokens: `update(state, None)` gives the output and the new state
        (its second argument asks for states in between, which nothing here keeps)."""
        output, state = update(self.cache[index], None)[:2]
        self.cache[index] = state
        return output, state

    # Joins and leaves

    def filter(self, rows: mx.array | Sequence[int]) -> None:
        """Keep `rows`, in their order; none leaves a batch of no rows.

        Raises:
            IndexError: a row that is not there.
        """
        before = self.batch_size
        keep = [_row(row, before) for row in _host(rows) or []]
        index = mx.array(keep, dtype=mx.int32)
        self.cache = [None if state is None else mx.take(state, index, axis=0) for state in self.cache]
        self._rows = len(keep)
        self._arrays.clear()
        if self._left_padding is not None:
            self._left_padding = [self._left_padding[row] for row in keep]
        if self._lengths is not None:
            self._lengths = [self._lengths[row] for row in keep]

    def extend(self, other: ArraysCache) -> None:
        """Join the rows of `other` below these; `other` is not changed.

        Raises:
            ValueError: another number of states, or a state of another dtype or shape.
        """
        joined = BatchMambaCache.merge([self, other])
        self.cache, self._rows = joined.cache, joined._rows
        self._left_padding, self._lengths = joined._left_padding, joined._lengths
        self._arrays.clear()

    def extract(self, idx: int) -> ArraysCache:
        """The single-request cache of row `idx`: arrays `[1, ...]` in memory of their own (their copy
        is started here, so that the batch's buffers are not held), unwritten states unwritten, the
        row's padding and length with it.

        Raises:
            IndexError: a row that is not there.
        """
        row = _row(idx, self.batch_size)
        index = mx.array([row], dtype=mx.int32)
        single = ArraysCache(len(self.cache))
        single.cache = [None if state is None else mx.take(state, index, axis=0) for state in self.cache]
        if self._left_padding is not None and self._left_padding[row] > 0:
            single.left_padding = mx.array(self._left_padding[row : row + 1], dtype=mx.int32)
        if self._lengths is not None and self._lengths[row] < UNBOUNDED:
            single.lengths = mx.array(self._lengths[row : row + 1], dtype=mx.int32)
        mx.async_eval(  # type: ignore[no-untyped-call]
            [state for state in single.cache if state is not None]
        )
        return single

    @classmethod
    def merge(cls, caches: Sequence[ArraysCache]) -> BatchMambaCache:
        """One batch of the rows of `caches`, in order.

        A cache may hold any number of rows; an `ArraysCache` with nothing written counts as one. Rows
        not yet written become zeros where another cache has written that state: a recurrent model
        starts from zeros. A state that nobody has written stays unwritten. Caches of no rows are passed
        over, whatever their states.

        Raises:
            ValueError: numbers of states differ, or a state's dtypes or shapes.
        """
        caches = [cache for cache in caches if cache.batch_size] or list(caches[:1])
        if not caches:
            return cls()
        sizes = sorted({len(cache.cache) for cache in caches})
        if len(sizes) > 1:
            raise ValueError(f"recurrent caches of {_listed(sizes)} states cannot share a batch")
        batch = cls(size=sizes[0])
        rows = [cache.batch_size for cache in caches]
        for which in range(sizes[0]):
            states = [cache.cache[which] for cache in caches]
            batch.cache[which] = _joined(which, states, rows)
        batch._rows = sum(rows)
        batch._left_padding = _joined_numbers([_host(c.left_padding) for c in caches], rows, 0)
        batch._lengths = _joined_numbers([_host(c.lengths) for c in caches], rows, UNBOUNDED)
        return batch


def _row(row: int, rows: int) -> int:
    if not -rows <= row < rows:
        raise IndexError(f"row {row} of a batch of {rows} rows")
    return row % rows


def _listed(values: Sequence[object]) -> str:
    return " and ".join(str(value) for value in values)


def _joined(which: int, states: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """`states`, one a cache, below each other; zeros for those not written."""
    written = [state for state in states if state is not None]
    if not written:
        return None
    dtypes = sorted({str(state.dtype) for state in written})
    if len(dtypes) > 1:
        raise ValueError(f"state {which} has dtypes {_listed(dtypes)}: they cannot share a batch")
    shapes = sorted({tuple(state.shape[1:]) for state in written})
    if len(shapes) > 1:
        raise ValueError(f"state {which} has row shapes {_listed(shapes)}: they cannot share a batch")
    parts = [
        mx.zeros((count, *shapes[0]), dtype=written[0].dtype) if state is None else state
        for state, count in zip(states, rows, strict=True)
    ]
    return mx.concatenate(parts, axis=0)


def _joined_numbers(parts: Sequence[list[int] | None], rows: Sequence[int], absent: int) -> list[int] | None:
    if all(part is None for part in parts):
        return None
    return [
        number
        for part, count in zip(parts, rows, strict=True)
        for number in (part if part is not None else [absent] * count)
    ]
