"""Keys and values of the rows of a batch, one attention layer: blocks by cohort, rows by slot.

A block is `[slots, kv_heads, capacity, head_dim]`. A full-attention layer keeps token p of a row at position
p. A sliding-window layer of `window` tokens is a ring: token p lies at p % window, and a block is never wider
than the window. Keys are rotated before they are stored, so the order within a ring does not matter to
attention; which positions hold a visible token does, and `DecodeStep` knows that.

A row's slot is cleared behind its tokens when the row takes it: a masked position has weight 0, and 0 times
the infinity or NaN of a row that went wrong before is NaN.

All methods run on the MLX thread. Nothing here reads an array on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from chairlift.cache.cpu_attention import attention
from chairlift.cache.device import on_cuda
from chairlift.cache.layout import Action, Drop, Move, Place, Rebuild
from chairlift.cache.ragged import ragged_attention, ragged_available
from chairlift.cache.step import CohortStep

Planes = Sequence[mx.array]
"""What a layer stores of tokens, `[rows, kv_heads, tokens, *]` each: keys and values, or their parts."""


class Block:
    """One cohort's planes; the arrays come with the first tokens, which tell their shapes."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.planes: list[mx.array] = []

    def allocate(self, like: Planes) -> None:
        """Zeroed planes shaped after `like`, if not there yet."""
        if not self.planes:
            self.planes = [_zeros_like(plane, self.slots, self.capacity) for plane in like]

    def clear(self, slot: int, tokens: int) -> None:
        """Zero a slot behind its first `tokens` positions."""
        if tokens < self.capacity:
            for plane in self.planes:
                plane[slot, :, tokens:] = 0

    @property
    def keys(self) -> mx.array | None:
        """`[slots, kv_heads, capacity, head_dim]`, where the planes are keys and values."""
        return self.planes[0] if self.planes else None

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.planes[0] = array

    @property
    def values(self) -> mx.array | None:
        return self.planes[1] if self.planes else None

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


class CohortKV:
    """Storage of one attention layer for all rows of a batch.

    Args:
        window: tokens a sliding-window layer keeps; None for full attention.
        single: the class of one request's cache (mlx-lm's or mlx-vlm's), for `read`.
    """

    def __init__(self, window: int | None = None, single: type[Any] | None = None) -> None:
        self.window = window
        self.single = single if single is not None else KVCache if window is None else RotatingKVCache
        self.blocks: dict[int, Block] = {}
        self._constants: dict[Any, mx.array] = {}

    def apply(self, actions: Sequence[Action]) -> None:
        """Carry out what the layout decided."""
        for action in actions:
            match action:
                case Rebuild():
                    self._rebuild(action)
                case Move():
                    self._move(action)
                case Drop(key):
                    del self.blocks[key]

    def write(self, place: Place, cache: Any) -> None:
        """Copy a single-request cache (batch 1) into a slot; one whose arrays are as large as the block, the
        only slot of which is its own, becomes the block without a copy.

        Raises:
            ValueError: a cache of another kind or window, or of more than one row.
        """
        block = self.blocks[place.cohort]
        offset = int(cache.offset)
        if offset == 0:
            block.clear(place.slot, 0)
            return
        if block.slots == 1 and not block.planes and self._fit(buffers := self.buffers_of(cache), block):
            # Aliases: what is written into the block does not show in the cache.
            block.planes = [plane[:] for plane in buffers]
            return
        planes = self.planes_of(cache)
        if planes[0].shape[0] != 1:
            raise ValueError(f"A row joins from a cache of batch 1, not {planes[0].shape[0]}.")
        block.allocate(planes)
        block.clear(place.slot, offset)
        for plane, own in zip(block.planes, planes, strict=True):
            for target, count, source in self._stretches(offset, own.shape[2]):
                _put_rows(plane, place.slot, target, own[:, :, source : source + count])

    def read(self, place: Place, tokens: int) -> Any:
        """The single-request cache of a slot that holds `tokens` tokens, in memory of its own."""
        block = self.blocks[place.cohort]
        kept = tokens if self.window is None else min(tokens, self.window)
        if not block.planes or not kept:
            return self.filled((), 0)
        slot = slice(place.slot, place.slot + 1)
        planes = [self._unrolled(plane[slot], tokens, kept) for plane in block.planes]
        if self.stores_late:
            # Before the next token is, in a ring in the oldest one's place.
            mx.async_eval(*planes)  # type: ignore[no-untyped-call]
        return self.filled(planes, tokens)

    def part(self, place: Place, start: int, stop: int) -> Planes:
        """Views of a slot's tokens [start, stop), for full attention: `[1, kv_heads, tokens, *]`."""
        slot = slice(place.slot, place.slot + 1)
        return [plane[slot, :, start:stop] for plane in self.blocks[place.cohort].planes]

    def append(self, step: CohortStep, keys: mx.array, values: mx.array) -> None:
        """Store one new token of each row of the cohort: `[rows, kv_heads, 1, head_dim]`, in slot order."""
        block = self.blocks[step.key]
        new = self.encoded(keys, values)
        block.allocate(new)
        if step.uniform is not None:
            at = step.uniform if self.window is None else step.uniform % self.window
            for plane, token in zip(block.planes, new, strict=True):
                plane[: step.used, :, at : at + 1] = token
        else:
            block.planes = [
                self._put(step, plane, token) for plane, token in zip(block.planes, new, strict=True)
            ]

    @property
    def stores_late(self) -> bool:
        """New tokens are best handed to `attend`, which stores them as it reads the others."""
        return on_cuda()

    def visible(self, step: CohortStep) -> tuple[mx.array, mx.array]:
        """Views of the used part of a block: `[used slots, kv_heads, longest, head_dim]`."""
        keys, values = self.arrays(step.key)
        longest = self._longest(step)
        return keys[: step.used, :, :longest], values[: step.used, :, :longest]

    def attend(
        self,
        step: CohortStep,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None = None,
        new: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """Attention of the cohort's rows over what they hold, their new tokens included.

        Args:
            queries: `[rows, heads, 1, head_dim]`, in slot order.
            window: tokens visible at most, the new one included; None for all that are kept.
            sinks: `[heads]`, one more logit per head that takes weight and gives nothing.
            new: keys and values of the new tokens, as `append` takes them, if they are yet to be stored.
        """
        if new is not None:
            block = self.blocks[step.key]
            if block.planes:
                # As they are, all but for sure: the kernel takes them for contiguous, and writes into them.
                block.planes = [mx.contiguous(plane) for plane in block.planes]
            else:
                self.append(step, *new)
                new = None
        keys, values = self.arrays(step.key)
        ragged = self._ragged(step, queries, keys, values, scale, window, sinks, new)
        if ragged is not None:
            if new is not None:
                # The same memory; whoever reads it from here on comes after what was written.
                block = self.blocks[step.key]
                block.planes = list(mx.depends(block.planes, [ragged]))
            return ragged
        if new is not None:
            self.append(step, *new)
            keys, values = self.arrays(step.key)
        if step.holes:
            queries = queries[step.fill]
        longest = self._longest(step)
        # Not `visible`: that is for a model's own arithmetic, which not every store allows.
        keys, values = (array[: step.used, :, :longest] for array in (keys, values))
        mask = step.mask(self.window, window)
        out = attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks, known=step.known)
        return out[step.slots] if step.holes else out

    # How tokens are stored

    def encoded(self, keys: mx.array, values: mx.array) -> Planes:
        """The planes of new tokens."""
        return keys, values

    def arrays(self, cohort: int) -> tuple[mx.array, mx.array]:
        """Keys and values of a whole block."""
        keys, values = self.blocks[cohort].planes
        return keys, values

    def planes_of(self, cache: Any) -> Planes:
        """The planes of a single-request cache, oldest token first, unused room cut off."""
        return temporal(cache)

    def buffers_of(self, cache: Any) -> Planes:
        """The planes of a single-request cache of full attention, the room behind its tokens included."""
        return cache.keys, cache.values

    def _fit(self, planes: Planes, block: Block) -> bool:
        return self.window is None and all(
            plane.shape[0] == 1 and plane.shape[2] == block.capacity for plane in planes
        )

    def filled(self, planes: Planes, tokens: int) -> Any:
        """A single-request cache of `tokens` tokens that holds `planes`."""
        cache = self.single() if self.window is None else self.single(max_size=self.window)
        return fill(cache, planes, tokens)

    def _longest(self, step: CohortStep) -> int:
        return step.longest if self.window is None else min(step.longest, self.window)

    def _put(self, step: CohortStep, block: mx.array, new: mx.array) -> mx.array:
        positions = step.positions(self.window, new.shape[1], new.shape[3])
        return mx.put_along_axis(block, positions, step.by_slot(new), axis=2)

    def _ragged(
        self,
        step: CohortStep,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        new: tuple[mx.array, mx.array] | None,
    ) -> mx.array | None:
        """Attention by the ragged kernel over a whole block, or None where it does not apply."""
        dim = queries.shape[-1]
        kinds = {array.dtype for array in (queries, keys, values, *(new or ()))}
        if len(kinds) > 1 or keys.shape != values.shape:
            return None
        if not ragged_available(dim, queries.shape[1] // keys.shape[1], queries.dtype):
            return None
        if self.window is not None and window is not None and window < min(self.window, step.longest):
            return None  # a ring does not hold its tokens in order
        return ragged_attention(
            queries,
            keys,
            values,
            step.slots,
            step.held,
            step.longest,
            scale=scale,
            window=None if self.window is not None else window,
            sinks=sinks,
            new=new,
            constants=self._constants,
        )

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    @property
    def buffers(self) -> int:
        """Arrays."""
        return sum(len(block.planes) for block in self.blocks.values())

    @property
    def bytes_per_token(self) -> int:
        for block in self.blocks.values():
            if block.nbytes:
                return block.nbytes // (block.slots * block.capacity)
        return 0

    def _width(self, capacity: int) -> int:
        return capacity if self.window is None else min(capacity, self.window)

    def _stretches(self, offset: int, held: int) -> list[tuple[int, int, int]]:
        """(target position, count, source position) of what a row of `offset` tokens keeps of its last
        `held`; two stretches where a ring wraps."""
        if self.window is None:
            return [(0, offset, 0)]
        kept = min(held, self.window, offset)
        source = held - kept
        target = (offset - kept) % self.window
        head = min(kept, self.window - target)
        stretches = [(target, head, source)]
        if kept > head:
            stretches.append((0, kept - head, source + head))
        return stretches

    def _unrolled(self, row: mx.array, tokens: int, kept: int) -> mx.array:
        """The last `kept` tokens of one row `[1, kv_heads, width, head_dim]`, oldest first."""
        start = 0 if self.window is None else (tokens - kept) % self.window
        # Two parts even where one is empty: one alone that is the whole block would be passed on, not copied.
        return mx.concatenate([row[:, :, start:kept], row[:, :, :start]], axis=2)

    def _rebuild(self, action: Rebuild) -> None:
        capacity = self._width(action.capacity)
        old = self.blocks.get(action.key)
        packed = action.sources != tuple(range(len(action.sources)))
        if old is not None and (old.slots, old.capacity) == (action.slots, capacity) and not packed:
            return  # a ring already as wide as its window does not grow
        block = Block(action.slots, capacity)
        if old is not None:
            block.planes = [_rebuilt(plane, action, capacity) for plane in old.planes]
        self.blocks[action.key] = block

    def _move(self, action: Move) -> None:
        (source_key, source_slot), (target_key, target_slot) = action.source, action.target
        source, target = self.blocks[source_key], self.blocks[target_key]
        if not source.planes:
            return
        target.allocate(source.planes)
        count = self._width(action.tokens)
        target.clear(target_slot, count)
        moved = slice(source_slot, source_slot + 1)
        for plane, old in zip(target.planes, source.planes, strict=True):
            _put_rows(plane, target_slot, 0, old[moved, :, :count])


def temporal(cache: Any) -> tuple[mx.array, mx.array]:
    """Keys and values of a single-request cache, oldest token first, unused room cut off."""
    keys, values, offset = cache.keys, cache.values, int(cache.offset)
    if not hasattr(cache, "max_size"):
        return keys[:, :, :offset], values[:, :, :offset]
    if cache.keep:
        raise ValueError("A rotating cache that keeps its first tokens cannot join a batch.")
    index, width = int(cache._idx), keys.shape[2]
    if index < min(offset, width):
        order = [slice(index, width), slice(0, index)]
        keys, values = (mx.concatenate([a[:, :, part] for part in order], axis=2) for a in (keys, values))
        return keys, values
    return keys[:, :, :index], values[:, :, :index]


def fill(cache: Any, planes: Planes, tokens: int) -> Any:
    """`cache`, a fresh one, as if it had taken `tokens` tokens of which it keeps `planes`."""
    if planes:
        cache.keys, cache.values = planes
        cache.offset = tokens
        if hasattr(cache, "max_size"):
            cache._idx = planes[0].shape[2]
    return cache


def _zeros_like(array: mx.array, slots: int, capacity: int) -> mx.array:
    return mx.zeros((slots, array.shape[1], capacity, array.shape[3]), dtype=array.dtype)


def _rebuilt(old: mx.array, action: Rebuild, capacity: int) -> mx.array:
    kept = min(capacity, old.shape[2])
    new = _zeros_like(old, action.slots, capacity)
    rows = len(action.sources)
    if rows == 0:
        return new
    part = old[:, :, :kept]
    part = part[:rows] if action.sources == tuple(range(rows)) else part[mx.array(action.sources)]
    _put_rows(new, 0, 0, part)
    return new


def _put_rows(plane: mx.array, slot: int, start: int, rows: mx.array) -> None:
    """Write rows into a plane, from a slot and a position on. Where they fill it mlx would have them as they
    are in the plane's place: a view of memory that others write into, and not in order."""
    if rows.shape == plane.shape:
        rows = mx.concatenate([rows, rows[:0]])
    plane[slot : slot + rows.shape[0], :, start : start + rows.shape[2]] = rows
