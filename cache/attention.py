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

from chairlift.cache.layout import Action, Drop, Move, Place, Rebuild
from chairlift.cache.ragged import ragged_attention, ragged_available
from chairlift.cache.step import CohortStep


class Block:
    """One cohort's keys and values; the arrays come with the first tokens, which tell their shapes."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def allocate(self, keys: mx.array, values: mx.array) -> None:
        """Zeroed arrays shaped after `keys` and `values` `[*, kv_heads, *, head_dim]`, if not there yet."""
        if self.keys is None or self.values is None:
            self.keys = _zeros_like(keys, self.slots, self.capacity)
            self.values = _zeros_like(values, self.slots, self.capacity)

    def clear(self, slot: int, tokens: int) -> None:
        """Zero a slot behind its first `tokens` positions."""
        if self.keys is not None and self.values is not None and tokens < self.capacity:
            self.keys[slot, :, tokens:] = 0
            self.values[slot, :, tokens:] = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.keys, self.values) if array is not None)


class CohortKV:
    """Storage of one attention layer for all rows of a batch.

    Args:
        window: tokens a sliding-window layer keeps; None for full attention.
        single: the class of one request's cache (mlx-lm's or mlx-vlm's), for `read`.
    """

    def __init__(self, window: int | None = None, single: type[Any] | None = None) -> None:
        self.window = window
        self._single = single if single is not None else KVCache if window is None else RotatingKVCache
        self.blocks: dict[int, Block] = {}
        self._constants: dict[float, mx.array] = {}

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
        """Copy a single-request cache (batch 1) into a slot.

        Raises:
            ValueError: a cache of another kind or window, or of more than one row.
        """
        block = self.blocks[place.cohort]
        if cache.size() == 0:
            block.clear(place.slot, 0)
            return
        keys, values = _temporal(cache)
        if keys.shape[0] != 1:
            raise ValueError(f"A row joins from a cache of batch 1, not {keys.shape[0]}.")
        block.allocate(keys, values)
        block.clear(place.slot, int(cache.offset))
        slot = slice(place.slot, place.slot + 1)
        assert block.keys is not None and block.values is not None
        for target, count, source in self._stretches(int(cache.offset), keys.shape[2]):
            block.keys[slot, :, target : target + count] = keys[:, :, source : source + count]
            block.values[slot, :, target : target + count] = values[:, :, source : source + count]

    def read(self, place: Place, tokens: int) -> Any:
        """The single-request cache of a slot that holds `tokens` tokens, in memory of its own."""
        block = self.blocks[place.cohort]
        kept = tokens if self.window is None else min(tokens, self.window)
        keys = values = None
        if block.keys is not None and block.values is not None and kept:
            keys = self._unrolled(block.keys[place.slot : place.slot + 1], tokens, kept)
            values = self._unrolled(block.values[place.slot : place.slot + 1], tokens, kept)
        cache = self._single() if self.window is None else self._single(max_size=self.window)
        cache.keys, cache.values = keys, values
        cache.offset = tokens if keys is not None else 0
        if self.window is not None:
            cache._idx = kept if keys is not None else 0
        return cache

    def append(self, step: CohortStep, keys: mx.array, values: mx.array) -> None:
        """Store one new token of each row of the cohort: `[rows, kv_heads, 1, head_dim]`, in slot order."""
        block = self.blocks[step.key]
        block.allocate(keys, values)
        assert block.keys is not None and block.values is not None
        if step.uniform is not None:
            at = step.uniform if self.window is None else step.uniform % self.window
            block.keys[: step.used, :, at : at + 1] = keys
            block.values[: step.used, :, at : at + 1] = values
        else:
            block.keys = self._put(step, block.keys, keys)
            block.values = self._put(step, block.values, values)

    def visible(self, step: CohortStep) -> tuple[mx.array, mx.array]:
        """Views of the used part of a block: `[used slots, kv_heads, longest, head_dim]`."""
        block = self.blocks[step.key]
        assert block.keys is not None and block.values is not None
        longest = step.longest if self.window is None else min(step.longest, self.window)
        return block.keys[: step.used, :, :longest], block.values[: step.used, :, :longest]

    def _put(self, step: CohortStep, block: mx.array, new: mx.array) -> mx.array:
        positions = step.positions(self.window, new.shape[1], new.shape[3])
        return mx.put_along_axis(block, positions, step.by_slot(new), axis=2)

    def ragged(
        self, step: CohortStep, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention of the cohort's rows by the ragged kernel, or None where it does not apply."""
        block = self.blocks[step.key]
        assert block.keys is not None and block.values is not None
        dim, kinds = queries.shape[-1], {queries.dtype, block.keys.dtype, block.values.dtype}
        if len(kinds) > 1 or block.keys.shape != block.values.shape:
            return None
        if not ragged_available(dim, queries.shape[1] // block.keys.shape[1], queries.dtype):
            return None
        if self.window is not None and window is not None and window < min(self.window, step.longest):
            return None  # a ring does not hold its tokens in order
        return ragged_attention(
            queries,
            block.keys,
            block.values,
            step.slots,
            step.held,
            step.longest,
            scale=scale,
            window=None if self.window is not None else window,
            sinks=sinks,
            constants=self._constants,
        )

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

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
        if start == 0:
            return mx.contiguous(row[:, :, :kept])
        return mx.concatenate([row[:, :, start:], row[:, :, :start]], axis=2)

    def _rebuild(self, action: Rebuild) -> None:
        capacity = self._width(action.capacity)
        old = self.blocks.get(action.key)
        packed = action.sources != tuple(range(len(action.sources)))
        if old is not None and (old.slots, old.capacity) == (action.slots, capacity) and not packed:
            return  # a ring already as wide as its window does not grow
        block = Block(action.slots, capacity)
        if old is not None and old.keys is not None and old.values is not None:
            block.keys = _rebuilt(old.keys, action, capacity)
            block.values = _rebuilt(old.values, action, capacity)
        self.blocks[action.key] = block

    def _move(self, action: Move) -> None:
        (source_key, source_slot), (target_key, target_slot) = action.source, action.target
        source, target = self.blocks[source_key], self.blocks[target_key]
        if source.keys is None or source.values is None:
            return
        target.allocate(source.keys, source.values)
        assert target.keys is not None and target.values is not None
        count = self._width(action.tokens)
        target.clear(target_slot, count)
        moved = slice(source_slot, source_slot + 1)
        slot = slice(target_slot, target_slot + 1)
        target.keys[slot, :, :count] = source.keys[moved, :, :count]
        target.values[slot, :, :count] = source.values[moved, :, :count]


def _temporal(cache: Any) -> tuple[mx.array, mx.array]:
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
    new[:rows, :, :kept] = part
    return new
