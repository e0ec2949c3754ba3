"""Attention that a model computes by its own code, one part of a step at a time.

Families whose attention does arithmetic on the keys that a cache returns (latent attention, chosen keys,
masks by block, tiled heads) cannot take a view in place of arrays. Their attention module is called once
for each part of the step instead: the decode rows of a cohort, or the prefill chunk of one row, each with a
cache and a mask such as upstream's code expects. Everything else of the model runs on all tokens of the
step at once, and memory is that of the cohorts. `chairlift.patches.parts` routes the modules' calls to
`by_parts` of the views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from chairlift.cache.attention import CohortKV
from chairlift.cache.step import CohortStep

Attention = Callable[[Sequence[mx.array], Any, Any], mx.array]
"""(arrays, mask, cache) -> output `[rows, tokens, hidden]`; the first array is the layer's input."""


class CohortCache:
    """The decode rows of one cohort as a model's cache of one layer. Free slots below the last row take part
    with some row's numbers, which are thrown away.

    Args:
        store: the layer's storage.
        cohort: geometry.
        offset: int32 `[used slots]`.
    """

    def __init__(self, store: CohortKV, cohort: CohortStep, offset: mx.array) -> None:
        self.offset = offset
        self._store = store
        self._cohort = cohort

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        if N != 1:
            raise ValueError(f"A decode step takes one token per row, not {N}.")
        return self._cohort.mask(self._store.window, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store `[used slots, kv_heads, 1, head_dim]`; gives `[used slots, kv_heads, longest, head_dim]`."""
        if self._cohort.holes:
            keys, values = keys[self._cohort.slots], values[self._cohort.slots]
        self._store.append(self._cohort, keys, values)
        return self._store.visible(self._cohort)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._store.visible(self._cohort)

    # Some models tie arrays that nothing else uses to those that a step evaluates.

    @property
    def keys(self) -> mx.array | None:
        return self._store.blocks[self._cohort.key].keys

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self._store.blocks[self._cohort.key].keys = array

    @property
    def values(self) -> mx.array | None:
        return self._store.blocks[self._cohort.key].values

    @values.setter
    def values(self, array: mx.array) -> None:
        """Upstream replaces values that it never reads by zeros, to cut their graph; the block's are kept."""


def by_parts(
    views: Sequence[Any],
    join: Callable[[Sequence[Any]], Any],
    attention: Attention,
    mask: Any,
    arrays: Sequence[mx.array],
    alone: bool,
) -> mx.array:
    """Attention of all tokens of a step, computed part by part.

    Args:
        views: of one layer, with `cohorts`, `spans`, `padding`, `offset` and (for cohorts) `store`.
        join: from one cache for each view to what `attention` takes.
        attention: called for each part with its arrays, mask and cache.
        mask: what the views' `make_mask` gave to the model, or anything with `for_part(cache, tokens)`.
        arrays: `[tokens, 1, dim]` or `[tokens, heads, 1, dim]`, in the order of the step.
        alone: the attention cannot tell the lengths of several rows apart.

    Returns:
        `[tokens, 1, dim]`.

    Raises:
        TypeError: a mask made by the model itself, or several rows for an attention that takes one.
    """
    first = views[0]
    outputs = []
    for cohort in first.cohorts:
        if alone:
            raise TypeError("This attention takes one row at a time.")
        rows = slice(cohort.start, cohort.stop)
        part = [array[rows] for array in (*arrays, first.offset)]
        if cohort.holes:
            part = [array[cohort.fill] for array in part]
        cache = join([CohortCache(view.store, cohort, part[-1]) for view in views])
        out = attention(part[:-1], _part_mask(mask, cache, 1), cache)
        outputs.append(out[cohort.slots] if cohort.holes else out)
    for index, (span, _) in enumerate(first.spans):
        cache = join([view.spans[index][1] for view in views])
        tokens = span.stop - span.start
        part = [array[span.start : span.stop].swapaxes(0, -2) for array in arrays]
        outputs.append(attention(part, _part_mask(mask, cache, tokens), cache).swapaxes(0, 1))
    if first.padding:
        outputs.append(mx.zeros((first.padding, *outputs[0].shape[1:]), dtype=outputs[0].dtype))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _part_mask(mask: Any, cache: Any, tokens: int) -> Any:
    for_part = getattr(mask, "for_part", None)
    if for_part is None:
        raise TypeError(f"Attention over a batch takes the mask of its cache, not {type(mask).__name__}.")
    return for_part(cache.caches[0] if isinstance(cache, CacheList) else cache, tokens)
