"""Parts of one request's caches as bytes: what is kept of a row for later rows.

A **page** holds some tokens' keys and values of every layer that keeps all tokens, side by side in one
array of bytes. A **state** holds what the other layers, recurrent and sliding-window, keep behind some
token. So each is one buffer, whatever the model, and nothing that moves it needs to know what is in it.

All methods run on the MLX thread; nothing is waited for here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from chairlift.cache.attention import CohortKV, Planes
from chairlift.cache.batch import (
    Caches,
    Layer,
    Nest,
    RecurrentLayer,
    Tree,
    is_stateful,
    leaves_of,
    paired,
    storage_of,
)

ALIGNMENT = 16
"""Bytes."""
GROUP_BYTES = 2**28
"""Pages that are put into caches at once: on their way they are in memory once more."""


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One plane of one layer: heads, numbers a token and head, and their type."""

    heads: int
    width: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * self.width * self.dtype.size


@dataclass(frozen=True, slots=True)
class State:
    """What layers without pages hold.

    Attributes:
        data: uint8 `[bytes]`.
        shapes: of the arrays in it, by layer; None for one that is not there.
    """

    data: mx.array
    shapes: tuple[tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of `data`, by the shapes."""
        arrays = [array for layer in self.shapes for array in layer if array is not None]
        return sum(aligned(math.prod(shape) * dtype.size) for shape, dtype in arrays)

    @property
    def described(self) -> str:
        """The shapes in JSON: by layer, [dtype, *shape] of each array, or null."""
        described = [[array and [_name(array[1]), *array[0]] for array in layer] for layer in self.shapes]
        return json.dumps(described)


class PageFormat:
    """How a model's caches become pages and come back.

    Args:
        template: fresh caches of the model (`make_cache()`).

    Raises:
        UnsupportedCache: naming a cache type that cannot be kept.
    """

    def __init__(self, template: Caches) -> None:
        self._trees: list[Tree] = [storage_of(cache) for cache in template]
        self.has_states = any(map(is_stateful, leaves_of(self._trees)))
        self._shapes: list[PlaneShape] = []
        self._planes_of_layer: list[int] = []

    def measure(self, caches: Caches) -> tuple[int, int]:
        """(bytes a token of pages, bytes of a state at most), from caches that hold a few tokens. Has to be
        called once, before anything else."""
        pages = [
            self._planes(layer, cache) for layer, cache in self._layers(caches) if not is_stateful(layer)
        ]
        self._planes_of_layer = [len(planes) for planes in pages]
        self._shapes = [
            PlaneShape(plane.shape[1], plane.shape[3], plane.dtype) for planes in pages for plane in planes
        ]
        states = 0
        for layer, cache in self._layers(caches):
            if isinstance(layer, RecurrentLayer):
                states += sum(array.nbytes for array in cache.cache if array is not None)
            elif layer.window is not None:
                states += (
                    sum(plane.nbytes // plane.shape[2] for plane in cache_planes(layer, cache)) * layer.window
                )
        return sum(shape.token_bytes for shape in self._shapes), states

    # Out of caches

    def planes(self, caches: Caches, start: int, stop: int) -> list[Planes]:
        """Views of a request's tokens [start, stop), by layer; for `pack`."""
        return [
            [plane[:, :, start:stop] for plane in self._planes(layer, cache)]
            for layer, cache in self._layers(caches)
            if not is_stateful(layer)
        ]

    def states(self, caches: Caches) -> list[Any]:
        """A request's caches that keep a state or a window; for `pack_state`."""
        return [cache for layer, cache in self._layers(caches) if is_stateful(layer)]

    def pack(self, planes: Sequence[Planes]) -> mx.array:
        """The page of some tokens: uint8 `[bytes]`.

        Raises:
            ValueError: planes of other shapes or types than those measured.
        """
        flat = [plane for layer in planes for plane in layer]
        self._check(flat)
        return mx.concatenate([_bytes(plane) for plane in flat]) if flat else mx.zeros((0,), dtype=mx.uint8)

    def _check(self, flat: Planes) -> None:
        found = [PlaneShape(plane.shape[1], plane.shape[3], plane.dtype) for plane in flat]
        if found != self._shapes:
            raise ValueError("These planes are not of the model that was measured.")

    def pack_many(self, planes: Sequence[Planes], parts: Sequence[tuple[int, int]]) -> list[mx.array]:
        """The pages of these parts [start, stop) of the planes, in order. Those at the beginning that follow
        one another and are equally long are made together: a copy for each plane and page is what a GPU takes
        long for, not the bytes. A CPU is quicker one by one (51 ms against 63 for 8 pages of 64 tokens).

        Raises:
            ValueError: as of `pack`.
        """
        flat = [plane for layer in planes for plane in layer]
        first, each = parts[0][0], parts[0][1] - parts[0][0]
        expected = [(first + index * each, first + (index + 1) * each) for index in range(len(parts))]
        alike = next((index for index, part in enumerate(parts) if part != expected[index]), len(parts))
        uneven = len(set(self._shapes)) != 1 or each * self._shapes[0].token_bytes % ALIGNMENT
        if alike < 2 or uneven or mx.default_device() == mx.cpu:
            alike = 0
        pages = self._pack_alike(flat, first, each, alike) if alike else []
        for start, stop in parts[alike:]:
            pages.append(self.pack([[plane[:, :, start:stop] for plane in layer] for layer in planes]))
        return pages

    def _pack_alike(self, flat: Planes, first: int, each: int, count: int) -> list[mx.array]:
        """`count` pages of `each` tokens from `first` on, of planes that are all of one shape and type."""
        self._check(flat)
        shape = self._shapes[0]
        together = mx.stack([plane[0, :, first : first + each * count] for plane in flat])
        together = together.reshape(len(flat), shape.heads, count, each, shape.width)
        ordered = mx.contiguous(together.transpose(2, 0, 1, 3, 4)).reshape(count, -1).view(mx.uint8)
        return [mx.contiguous(page) for page in ordered]

    def page_bytes(self, tokens: int) -> int:
        """Bytes of a page of so many tokens."""
        return sum(aligned(tokens * shape.token_bytes) for shape in self._shapes)

    def pack_state(self, caches: Sequence[Any]) -> State:
        """The state that `states` gave."""
        shapes, parts = [], []
        for layer, cache in zip(self._stateful(), caches, strict=True):
            arrays = (
                list(cache.cache) if isinstance(layer, RecurrentLayer) else list(cache_planes(layer, cache))
            )
            shapes.append(tuple(None if array is None else (array.shape, array.dtype) for array in arrays))
            parts += [_bytes(array) for array in arrays if array is not None]
        data = mx.concatenate(parts) if parts else mx.zeros((0,), dtype=mx.uint8)
        return State(data, tuple(shapes))

    def state_of(self, data: mx.array, shapes: str) -> State:
        """A state from its bytes and what `State.described` said of it.

        Raises:
            ValueError: they do not belong together, or to this model.
        """
        layers = tuple(tuple(map(_shape_of, layer)) for layer in json.loads(shapes))
        state = State(data, layers)
        if len(layers) != len(self._stateful()) or data.shape != (state.nbytes,):
            raise ValueError("The state is not of this model.")
        return state

    # Into caches

    def restore(
        self, pages: Sequence[tuple[mx.array, int]], tokens: int, state: State | None, *, room: int = 0
    ) -> list[Any]:
        """Fresh caches of one request that holds the first `tokens` tokens of these pages, in memory of
        their own.

        Args:
            pages: (page, tokens in it), from position 0 on; all but the last equally long.
            state: behind exactly `tokens` tokens, where the model has layers of that kind.
            room: tokens that the caches are to have room for, if that is more.
        """
        planes = iter(self._unpacked(pages, tokens, max(tokens, room)))
        states = iter(self._unpacked_state(state)) if state is not None else iter(())
        return [self._restored(tree, planes, states, tokens) for tree in self._trees]

    def _restored(self, tree: Tree, planes: Iterator[Planes], states: Iterator[Any], tokens: int) -> Any:
        if isinstance(tree, Nest):
            return tree.single(*(self._restored(part, planes, states, tokens) for part in tree))
        if not is_stateful(tree):
            return tree.filled(next(planes), tokens)
        arrays = next(states)
        if isinstance(tree, CohortKV):
            return tree.filled(arrays, tokens)
        return tree.restored(arrays)

    def _unpacked(
        self, pages: Sequence[tuple[mx.array, int]], tokens: int, capacity: int
    ) -> Iterator[Planes]:
        """By layer: planes `[1, heads, capacity, width]`, of which the first `tokens` are filled."""
        each = pages[0][1]
        # Where a plane is made of whole pages, they are written with one copy each plane.
        whole = tokens // each if capacity % each == 0 else 0
        apart = (capacity // each, each) if whole else (capacity,)
        planes = [mx.zeros((shape.heads, *apart, shape.width), dtype=shape.dtype) for shape in self._shapes]
        for start, stacked in _stacked(pages[:whole]):
            for plane, numbers in self._numbers(planes, stacked, each):
                plane[:, start : start + len(stacked)] = numbers
            mx.async_eval(*planes)  # type: ignore[no-untyped-call]
        planes = [
            plane.reshape(1, shape.heads, capacity, shape.width)
            for plane, shape in zip(planes, self._shapes, strict=True)
        ]
        for first, stacked in _stacked(pages[whole:]):
            start = (whole + first) * each
            size = pages[whole + first][1]
            stop = min(start + len(stacked) * size, tokens)
            for plane, numbers in self._numbers(planes, stacked, size):
                flat = numbers.reshape(numbers.shape[0], -1, numbers.shape[3])
                plane[0, :, start:stop] = flat[:, : stop - start]
            mx.async_eval(*planes)  # type: ignore[no-untyped-call]
        start = 0
        for count in self._planes_of_layer:
            yield planes[start : start + count]
            start += count

    def _numbers(
        self, planes: list[mx.array], stacked: mx.array, each: int
    ) -> Iterator[tuple[mx.array, mx.array]]:
        """Each of `planes` with what `stacked`, pages of `each` tokens `[pages, bytes]`, hold of it: a view
        `[heads, pages, tokens, width]`.

        All bytes become numbers before one plane's are taken: the other way round they would not be
        contiguous, and be copied (mlx, `View`)."""
        typed = {dtype: stacked.view(dtype) for dtype in {shape.dtype for shape in self._shapes}}
        at = 0
        for plane, shape in zip(planes, self._shapes, strict=True):
            size, width = each * shape.token_bytes, shape.dtype.size
            if size:
                part = typed[shape.dtype][:, at // width : (at + size) // width]
                yield plane, part.reshape(-1, shape.heads, each, shape.width).swapaxes(0, 1)
            at += aligned(size)

    def _unpacked_state(self, state: State) -> Iterator[list[mx.array | None]]:
        start = 0
        for layer in state.shapes:
            arrays: list[mx.array | None] = []
            for part in layer:
                if part is None:
                    arrays.append(None)
                    continue
                shape, dtype = part
                size = math.prod(shape) * dtype.size
                data = state.data[start : start + size]
                arrays.append(
                    mx.contiguous(data.view(dtype).reshape(shape)) if size else mx.zeros(shape, dtype)
                )
                start += aligned(size)
            yield arrays

    # Layers

    def _layers(self, caches: Caches) -> Iterable[tuple[Layer, Any]]:
        return paired(self._trees, caches, CohortKV | RecurrentLayer)

    def _stateful(self) -> list[Layer]:
        return [layer for layer in leaves_of(self._trees) if is_stateful(layer)]

    def _planes(self, layer: Layer, cache: Any) -> Planes:
        assert isinstance(layer, CohortKV)
        return layer.planes_of(cache)


def _stacked(pages: Sequence[tuple[mx.array, int]]) -> Iterator[tuple[int, mx.array]]:
    """As many as may be put into caches at once and are equally long: (index of the first, uint8
    `[pages, bytes]`)."""
    first = 0
    while first < len(pages):
        page, tokens = pages[first]
        at_once = max(1, GROUP_BYTES // max(1, page.nbytes))
        group = [page for page, held in pages[first : first + at_once] if held == tokens]
        yield first, mx.stack(group)
        first += len(group)


def cache_planes(layer: Layer, cache: Any) -> Planes:
    """What a sliding-window layer's cache holds of its window, oldest token first. Behind a chunk of
    prefill it holds more, which its next step drops."""
    assert isinstance(layer, CohortKV) and layer.window is not None
    return [plane[:, :, -layer.window :] for plane in layer.planes_of(cache)] if int(cache.offset) else ()


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _shape_of(described: Any) -> tuple[tuple[int, ...], mx.Dtype] | None:
    """Raises: ValueError where that is no description of an array."""
    if described is None:
        return None
    name, *shape = described
    dtype = getattr(mx, name) if isinstance(name, str) else None
    if not isinstance(dtype, mx.Dtype) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{described!r} describes no array.")
    return tuple(shape), dtype


def aligned(size: int) -> int:
    """Bytes that an array of `size` takes in a page: a view of any type begins at a multiple of its size."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(array: mx.array) -> mx.array:
    """uint8 `[aligned bytes]`, in order."""
    if not array.size:
        return mx.zeros((0,), dtype=mx.uint8)
    data = mx.contiguous(array).reshape(-1).view(mx.uint8)
    return mx.pad(data, (0, aligned(data.size) - data.size)) if data.size % ALIGNMENT else data
