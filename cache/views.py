"""What a model is given in place of its caches while a batch steps.

A model's attention does three things with its cache: it reads `offset` for the rotary positions, stores the
new keys and values with `update_and_fetch`, and calls `scaled_dot_product_attention(q, k, v, cache=…)`.
`AttendView` returns itself for k and v; the seam (`chairlift.patches.attention`) sees that and calls
`attend`, so attention runs per cohort and per prefill span while everything else of the model runs on all
tokens of the step at once. A model that does arithmetic on k and v raises a TypeError on such a view, and is
served by `DenseView` instead, which returns whole arrays and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from chairlift.cache.attention import CohortKV
from chairlift.cache.parts import Attention, by_parts
from chairlift.cache.prefill import attend_span
from chairlift.cache.span_kernel import Chunk, attend_chunks, chunk_of, span_kernel_available
from chairlift.cache.step import CohortStep, DecodeStep


@dataclass(frozen=True, slots=True)
class SeamMask:
    """Stands for the mask of every row until attention runs. `window`: tokens visible, None for all kept;
    `array`: the model asked for an array where there is a mask at all."""

    window: int | None = None
    array: bool = False

    def for_part(self, cache: Any, tokens: int) -> Any:
        """The mask that the model would have got for `tokens` more tokens on a cache of its own kind."""
        return cache.make_mask(tokens, return_array=self.array, window_size=self.window)


@dataclass(frozen=True, slots=True)
class SpanStep:
    """A prefill chunk in a flat step: tokens `[start, stop)` of the step are positions
    `[offset, offset + stop - start)` of one row, whose caches (one per layer) are its own."""

    start: int
    stop: int
    offset: int
    masks: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Masks made for it, shared by the layers."""

    def mask(self, held: int, ring: int | None, window: int | None) -> mx.array | str | None:
        """`span_mask`, made once."""
        key = (held, ring, window)
        if key not in self.masks:
            self.masks[key] = span_mask(self.stop - self.start, self.offset, held, ring, window)
        mask: mx.array | str | None = self.masks[key]
        return mask


class AttendView:
    """One attention layer of one step, as the model's cache.

    The step is flat: `[tokens, 1, hidden]`, the decode rows first, then the spans' tokens; `offset` is the
    position of every token. Without spans it is an ordinary batch of rows with one token each.

    Args:
        store: this layer's storage for the decode rows.
        step: geometry of the decode rows; None where only spans step.
        offset: int32 `[tokens]`.
        spans: the prefill chunks, with this layer's cache of each row.
        padding: tokens at the end of the step that belong to nobody; attention gives zeros for them.
    """

    def __init__(
        self,
        store: CohortKV,
        step: DecodeStep | None,
        offset: mx.array,
        spans: Sequence[tuple[SpanStep, Any]] = (),
        padding: int = 0,
    ) -> None:
        self.offset = offset
        self._padding = padding
        self._store = store
        self._step = step
        self._spans = spans
        self._span_kv: list[tuple[mx.array, mx.array]] = []
        self._new: dict[int, tuple[mx.array, mx.array]] = {}
        """By cohort, what attention is to store."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> SeamMask:
        return SeamMask(window_size, return_array)

    @property
    def _idx(self) -> int:
        """Tokens of the longest row before this step: mlx-vlm's models read it where their own batch caches
        keep their write index, a number that the host knows."""
        return _longest(self._step, self._spans)

    @property
    def store(self) -> CohortKV:
        return self._store

    @property
    def cohorts(self) -> Sequence[CohortStep]:
        return self._step.cohorts if self._step is not None else ()

    @property
    def spans(self) -> Sequence[tuple[SpanStep, Any]]:
        return self._spans

    @property
    def padding(self) -> int:
        return self._padding

    def by_parts(
        self, attention: Attention, mask: Any, arrays: Sequence[mx.array], *, alone: bool = False
    ) -> mx.array:
        """Attention by the model's own code: `chairlift.cache.parts.by_parts`."""
        return by_parts([self], _only, attention, SeamMask() if mask is None else mask, arrays, alone)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[AttendView, AttendView]:
        """Store `[tokens, kv_heads, 1, head_dim]`."""
        for cohort in self.cohorts:
            part = slice(cohort.start, cohort.stop)
            if self._store.stores_late:
                self._new[cohort.key] = keys[part], values[part]
            else:
                self._store.append(cohort, keys[part], values[part])
        self._span_kv = [
            cache.update_and_fetch(_as_row(keys, span), _as_row(values, span)) for span, cache in self._spans
        ]
        return self, self

    def keys_and_values(self) -> tuple[AttendView, AttendView]:
        """For layers that attend to an earlier layer's keys in the same step."""
        return self, self

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: SeamMask | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of `[tokens, heads, 1, head_dim]` over what each token may see; same shape but for the
        head size of the values.

        Raises:
            TypeError: a mask that the model changed or made itself.
        """
        if mask is not None and not isinstance(mask, SeamMask):
            raise TypeError(f"Attention over a batch takes the mask of its cache, not {type(mask).__name__}.")
        window = mask.window if mask is not None else None
        outputs = [self._attend_cohort(cohort, queries, scale, window, sinks) for cohort in self.cohorts]
        at_once = self._attend_spans_at_once(queries, scale, window, sinks)
        if at_once is not None:
            return mx.concatenate([*outputs, at_once], axis=0) if outputs else at_once
        for (span, cache), (keys, values) in zip(self._spans, self._span_kv, strict=True):
            shown = span.mask(keys.shape[2], self._store.window, window)
            out = attend_span(
                _as_row(queries, span),
                keys,
                values,
                scale=scale,
                mask=shown,
                sinks=sinks,
                known=span.masks,
                buffers=_buffers(cache),
            )
            outputs.append(out[0].swapaxes(0, 1)[:, :, None])
        if self._padding:
            outputs.append(mx.zeros((self._padding, *outputs[0].shape[1:]), dtype=outputs[0].dtype))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def _attend_spans_at_once(
        self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """All chunks and the padding in one launch, or None where it does not apply."""
        if not self._spans:
            return None
        kinds = {array.dtype for pair in self._span_kv for array in pair} | {queries.dtype}
        if len(kinds) > 1 or any(keys.shape != values.shape for keys, values in self._span_kv):
            return None
        kv_heads = self._span_kv[0][0].shape[1]
        heads = queries.shape[3], queries.shape[1], kv_heads
        if not span_kernel_available(*heads, queries.dtype, sinks is not None):
            return None
        ring = self._store.window
        chunks, arrays = list[Chunk](), list[tuple[mx.array, mx.array]]()
        for (span, cache), shown in zip(self._spans, self._span_kv, strict=True):
            held, tokens = shown[0].shape[2], span.stop - span.start
            pair = _buffers(cache) or shown
            look = ring if window is None else window
            if tokens == 1 and ring is not None and look is not None and look < min(ring, held):
                return None  # a ring does not hold its tokens in order
            arrays.append(pair)
            chunks.append(
                chunk_of(span.start, tokens, span.offset, held, pair[0].shape[2], look, ring=ring is not None)
            )
        known = self._spans[0][0].masks
        return attend_chunks(
            queries, chunks, arrays, scale=scale, sinks=sinks, padding=self._padding, known=known
        )

    def _attend_cohort(
        self,
        cohort: CohortStep,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        part, new = queries[cohort.start : cohort.stop], self._new.pop(cohort.key, None)
        return self._store.attend(cohort, part, scale, window, sinks, new)


class DenseView:
    """One attention layer of a decode step for models that do arithmetic on keys, values or masks: the rows
    are slots 0..n-1 of one block, and the model gets the arrays themselves.

    Args:
        store: this layer's storage.
        step: geometry; one cohort without holes.
        offset: int32 `[rows]`.
    """

    def __init__(self, store: CohortKV, step: DecodeStep, offset: mx.array) -> None:
        (self._cohort,) = step.cohorts
        if self._cohort.holes:
            raise ValueError("A dense block has no free slot between rows.")
        self._store = store
        self._idx = _longest(step)
        self.offset = offset

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        if N != 1:
            raise ValueError(f"A decode step takes one token per row, not {N}.")
        return self._cohort.mask(self._store.window, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store `[rows, kv_heads, 1, head_dim]`; returns `[rows, kv_heads, longest, head_dim]`."""
        self._store.append(self._cohort, keys, values)
        return self.keys_and_values()

    def by_parts(
        self, attention: Attention, mask: Any, arrays: Sequence[mx.array], *, alone: bool = False
    ) -> mx.array:
        """The whole step is one part."""
        if alone:
            raise TypeError("This attention takes one row at a time.")
        return attention(arrays, mask, self)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the rows hold, this step's tokens included if they are stored."""
        return self._store.visible(self._cohort)


class ViewList(CacheList):  # type: ignore[misc]
    """The views of a layer that has several caches."""

    def by_parts(
        self, attention: Attention, mask: Any, arrays: Sequence[mx.array], *, alone: bool = False
    ) -> mx.array:
        """As the views' own, with a list of caches for each part."""
        if isinstance(self.caches[0], DenseView):
            return self.caches[0].by_parts(lambda a, m, _: attention(a, m, self), mask, arrays, alone=alone)
        mask = SeamMask() if mask is None else mask
        return by_parts(list(self.caches), lambda caches: CacheList(*caches), attention, mask, arrays, alone)


def span_mask(
    tokens: int, offset: int, held: int, ring: int | None, window: int | None
) -> mx.array | str | None:
    """The mask of a prefill chunk over its row's keys, of which the last `tokens` are its own.

    Args:
        tokens: tokens in the chunk.
        offset: position of its first token.
        held: keys in the row's cache after the chunk, oldest first (any order for a single token).
        ring: tokens that the layer's cache keeps; None keeps all.
        window: tokens, the own one included, that attention may look back; None for `ring`.

    Returns:
        None, "causal", or boolean `[tokens, held]`.

    Raises:
        ValueError: a single token whose keys lie in a ring, under a window smaller than it.
    """
    window = ring if window is None else window
    if window is None or offset + tokens <= window:
        return None if tokens == 1 else "causal"
    if tokens == 1 and ring is not None:
        if window < ring:
            raise ValueError("A window smaller than the cache's own needs its keys in order.")
        return None
    first = offset + tokens - held
    keys = mx.arange(first, first + held)
    queries = mx.arange(offset, offset + tokens)[:, None]
    return (keys <= queries) & (keys > queries - window)


def _only(caches: Sequence[Any]) -> Any:
    (cache,) = caches
    return cache


def _longest(step: DecodeStep | None, spans: Sequence[tuple[SpanStep, Any]] = ()) -> int:
    rows = step.lengths if step is not None else ()
    return max([0, *rows, *(span.offset for span, _ in spans)])


def _buffers(cache: Any) -> tuple[mx.array, mx.array] | None:
    """A full-attention cache's whole arrays, room at the end included."""
    if type(cache).__name__ != "KVCache":
        return None
    keys, values = cache.state[:2]
    return keys, values


def _as_row(array: mx.array, span: SpanStep) -> mx.array:
    """Tokens of a flat step `[tokens, heads, 1, dim]` as one row `[1, heads, tokens, dim]`."""
    return array[span.start : span.stop, :, 0].swapaxes(0, 1)[None]
