"""Qwen3.5 (and 3.6) of mlx-vlm in a batch whose rows have different lengths and images.

Upstream: mlx-vlm 0.7.10. Its attention takes an array of offsets and slices masks by the cache's write index,
so it no longer dies of 'Slice indices must be integers or None'. Still wrong there, each a test in
tests/patches/test_qwen3_5.py:

- the model object keeps `_rope_deltas` and `_position_ids` of its last call. A batch that steps without them
  in its arguments gets positions 0, 1, … in every row (fresh model), or the last request's delta in all;
- position ids of another length than the step's raise in a concatenation as soon as offsets are an array;
- attention without positions needs a cache, and a mask is cut by `_idx`, which in a rotated cache is less
  than its keys;
- a step reads the device: the left padding of the first attention layer, the offset of a batch of one row
  (whose caches it also copies whole), and the largest offset of a cache without a write index;
- with positions given, nothing evaluates the caches' offsets, so their graph grows by a node a step.

The mend gives every row its own positions, `(3, rows, tokens)`: its offset, plus the delta of its own images,
which travels with the row in the recurrent cache of the first layer (merge, filter, extend, extract). Nothing
is kept on the model. Gate, norms, the left-padded decode hint and speculative verification are upstream's.

mlx-lm 0.32.2's Qwen3.5 gives its rope the array of offsets and is right as it is.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

_MARK = "__chairlift_original__"
LANGUAGE = "mlx_vlm.models.qwen3_5.language"
CACHE = "mlx_vlm.models.cache"


def patch_qwen35_attention_for_batching() -> bool:
    """Mend mlx-vlm's Qwen3.5, of which the MoE and text-only variants are subclasses. Idempotent.

    Returns:
        True where it is applied, now or before; False where mlx-vlm or its Qwen3.5 module is absent.

    Raises:
        RuntimeError: an mlx-vlm whose Qwen3.5 is built differently.
    """
    targets = _targets()
    if targets is None:
        return False
    for owner, name, replacement in targets:
        original = vars(owner).get(name)
        if original is None:
            raise RuntimeError(f"this mlx-vlm has no {owner.__name__}.{name}; the patch is for 0.7.10")
        if not hasattr(original, _MARK):
            new = replacement(original)
            setattr(new, _MARK, original)
            setattr(owner, name, new)
    return True


def undo_qwen35_attention_for_batching() -> None:
    """Put the originals back."""
    for owner, name, _ in _targets() or ():
        original = vars(owner).get(name)
        if hasattr(original, _MARK):
            setattr(owner, name, getattr(original, _MARK))


def _targets() -> list[tuple[Any, str, Callable[[Any], Any]]] | None:
    """(owner, name, what makes the replacement from the original); None where mlx-vlm is absent."""
    try:
        language: Any = importlib.import_module(LANGUAGE)
        caches: Any = importlib.import_module(CACHE)
    except ImportError:
        return None
    arrays, batch = caches.ArraysCache, caches.BatchKVCache
    return [
        (language.LanguageModel, "__call__", _language_model),
        (language.Qwen3_5Attention, "_prepare_projected_qkv", _attention),
        (language, "_qwen3_5_left_padding_info", _left_padding_info),
        (language, "_is_single_row_batch_cache", _single_row),
        (language, "cache_position_offset", _position_offset),
        (batch, "prepare", _forgetting_padding),
        (batch, "finalize", _forgetting_padding),
        (arrays, "merge", _merge),
        (arrays, "filter", _filter),
        (arrays, "extend", _extend),
        (arrays, "extract", _extract),
    ]


# Positions


def _starts(cache: Any) -> int | mx.array:
    """Tokens before the step: one number for all rows, or int32 `[rows]` (negative while a row has left
    padding to come)."""
    offset = 0 if cache is None else cache.offset
    return offset.reshape(-1) if isinstance(offset, mx.array) else int(offset)


def _fits(ids: mx.array | None, rows: int, tokens: int) -> bool:
    """Whether position ids are those of the step: `[1 | rows, tokens]`, or three such."""
    return ids is not None and (
        ids.shape[-1] == tokens
        and ids.shape[-2] in (1, rows)
        and (ids.ndim == 2 or (ids.ndim == 3 and ids.shape[0] == 3))
    )


def _as_three(ids: mx.array, rows: int) -> mx.array:
    ids = ids[None] if ids.ndim == 2 else ids
    return mx.broadcast_to(ids, (3, rows, ids.shape[-1]))


def _column(deltas: mx.array | None, rows: int) -> mx.array | None:
    """Deltas of any shape upstream uses as int32 `[rows, 1]`; None where they are of other rows."""
    if deltas is None or deltas.size not in (1, rows):
        return None
    return mx.broadcast_to(deltas.reshape(-1, 1).astype(mx.int32), (rows, 1))


def row_positions(starts: int | mx.array, rows: int, tokens: int, deltas: mx.array | None = None) -> mx.array:
    """Positions `[3, rows, tokens]` of text that follows `starts` tokens, with `[rows, 1]` deltas.

    A row's left padding counts as position 0.
    """
    first = mx.broadcast_to(mx.array(starts, dtype=mx.int32).reshape(-1)[:rows], (rows,))
    ids = mx.maximum(first[:, None] + mx.arange(tokens, dtype=mx.int32), 0)
    return _as_three(ids if deltas is None else ids + deltas, rows)


def _delta_after(ids: mx.array, starts: int | mx.array) -> mx.array:
    """The delta `[rows, 1]` of rows whose positions so far are `ids` `[3, rows, tokens]`, after `starts`
    tokens: the next position less the number of tokens."""
    following = ids.max(axis=(0, 2)) + 1
    return (following - starts - ids.shape[-1])[:, None].astype(mx.int32)


def _step_positions(
    model: Any, inputs: mx.array, cache: Any, held: mx.array | None, told: dict[str, Any]
) -> tuple[mx.array, mx.array | None]:
    """Positions `[3, rows, tokens]` of the step, and the rows' deltas after it (None: all 0).

    In order: the ids given, if they are the step's; the step's part of the ids of a whole prompt; the
    index of a prompt with images; each row's own count and delta.
    """
    rows, tokens = inputs.shape
    attention = cache[model.model.fa_idx] if cache else None
    starts = _starts(attention)
    deltas = _column(told["rope_deltas"], rows)
    held = _column(held, rows)
    ids = told["position_ids"]
    if _fits(ids, rows, tokens):
        ids = _as_three(ids, rows)
        if deltas is None:
            deltas = held if tokens == 1 and held is not None else _delta_after(ids, starts)
        return ids, deltas
    if ids is not None and isinstance(starts, int) and _fits(ids, rows, ids.shape[-1]):
        whole = _as_three(ids, rows)
        if starts + tokens <= whole.shape[-1]:
            return whole[..., starts : starts + tokens], deltas if deltas is not None else _delta_after(
                whole, 0
            )
    mask = told["mask"]
    mask = mask if mask is not None and mask.shape == inputs.shape else None
    fresh = attention is None or (hasattr(attention, "empty") and attention.empty())
    grids = told["image_grid_thw"], told["video_grid_thw"]
    if fresh and (any(grid is not None for grid in grids) or (mask is not None and isinstance(starts, int))):
        if mask is None and isinstance(starts, mx.array):
            mask = (mx.arange(tokens) >= -starts[:rows, None]).astype(mx.int32)
        ids, index = model.get_rope_index(inputs, *grids, mask)
        if deltas is None:
            deltas = _column(index, rows)
        return _as_three(ids, rows), deltas
    deltas = held if deltas is None else deltas
    return row_positions(starts, rows, tokens, deltas), deltas


def _language_model(original: Any) -> Any:
    arrays = importlib.import_module(CACHE).ArraysCache

    @functools.wraps(original)
    def __call__(
        self: Any,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        mask: mx.array | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        inherited = getattr(type(self).__call__, _MARK, None) is original
        if not inherited:
            # A subclass with a call of its own (qwen4_exp) keeps state of its own.
            return original(self, inputs, inputs_embeds, mask, cache, **kwargs)
        told = {
            name: kwargs.pop(name, None)
            for name in ("position_ids", "rope_deltas", "image_grid_thw", "video_grid_thw", "attention_mask")
        }
        kwargs.pop("pixel_values", None)
        told["mask"] = mask if mask is not None else told["attention_mask"]
        first = cache[self.model.ssm_idx] if cache else None
        held = getattr(first, "rope_deltas", None) if isinstance(first, arrays) else None
        positions, deltas = _step_positions(self, inputs, cache, held, told)
        output = original(self, inputs, inputs_embeds, mask, cache, position_ids=positions, **kwargs)
        if isinstance(first, arrays):
            # The call may have replaced the caches. Those of other classes would not carry it.
            cache[self.model.ssm_idx].rope_deltas = deltas
        return output

    return __call__


# Attention


def _attention(original: Any) -> Any:
    @functools.wraps(original)
    def _prepare_projected_qkv(
        self: Any,
        q_proj_output: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        position_ids: mx.array | None,
        position_embeddings: tuple[mx.array, mx.array] | None,
        mask: Any,
    ) -> tuple[Any, ...]:
        rows, tokens, _ = q_proj_output.shape
        if not _fits(position_ids, rows, tokens):
            position_ids, position_embeddings = row_positions(_starts(cache), rows, tokens), None
        elif position_embeddings is not None and position_embeddings[0].shape[-2] != tokens:
            position_embeddings = None
        queries, keys, values, gate, _ = original(
            self, q_proj_output, keys, values, cache, position_ids, position_embeddings, None
        )
        if isinstance(keys, mx.array) and isinstance(getattr(cache, "offset", None), mx.array):
            keys = mx.depends(keys, cache.offset)
        return queries, keys, values, gate, _cut(mask, keys, cache)

    return _prepare_projected_qkv


def _cut(mask: Any, keys: Any, cache: Any) -> Any:
    """An array mask as long as the keys, a number that the host knows."""
    if not isinstance(mask, mx.array):
        return mask
    held = keys[0] if isinstance(keys, tuple) else keys
    length = held.shape[-2] if isinstance(held, mx.array) else getattr(cache, "_idx", mask.shape[-1])
    return mask[..., : int(length)]


# What is read of the device


def _left_padding_info(original: Any) -> Any:
    plain = importlib.import_module(CACHE).BatchKVCache

    @functools.wraps(original)
    def _qwen3_5_left_padding_info(cache: Any) -> Any:
        """Read once per batch of full KV: joins and leaves make a new array, and what changes it in place
        (`prepare`, `finalize`) forgets it. Rotating caches change theirs in place at every step."""
        if type(cache) is not plain:
            return original(cache)
        known = getattr(cache, "_chairlift_padding", None)
        if known is None or known[0] is not cache.left_padding:
            known = cache._chairlift_padding = (cache.left_padding, original(cache))
        return known[1]

    return _qwen3_5_left_padding_info


def _forgetting_padding(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._chairlift_padding = None
        return original(self, *args, **kwargs)

    return call


def _single_row(original: Any) -> Any:
    @functools.wraps(original)
    def _is_single_row_batch_cache(cache_entry: Any) -> bool:
        """No way of its own for a batch of one row."""
        return False

    return _is_single_row_batch_cache


def _position_offset(original: Any) -> Any:
    @functools.wraps(original)
    def cache_position_offset(cache: Any) -> int:
        """0 where only the device knows: positions are always given, so it is not used."""
        if isinstance(getattr(cache, "offset", None), mx.array) and not (
            hasattr(cache, "_offset") or hasattr(cache, "_idx")
        ):
            return 0
        return int(original(cache))

    return cache_position_offset


# A row's delta goes where its recurrent state goes


def _stacked(caches: Sequence[Any], rows: Sequence[int]) -> mx.array | None:
    columns = [_column(getattr(cache, "rope_deltas", None), n) for cache, n in zip(caches, rows, strict=True)]
    if all(column is None for column in columns):
        return None
    return mx.concatenate(
        [
            mx.zeros((n, 1), dtype=mx.int32) if column is None else column
            for column, n in zip(columns, rows, strict=True)
        ]
    )


def _merge(original: Any) -> Any:
    def merge(cls: Any, caches: Sequence[Any]) -> Any:
        batch = original.__func__(cls, caches)
        batch.rope_deltas = _stacked(caches, [1] * len(caches))
        return batch

    return classmethod(merge)


def _filter(original: Any) -> Any:
    @functools.wraps(original)
    def filter(self: Any, batch_indices: Any) -> None:
        deltas = getattr(self, "rope_deltas", None)
        original(self, batch_indices)
        self.rope_deltas = None if deltas is None else deltas[batch_indices]

    return filter


def _extend(original: Any) -> Any:
    @functools.wraps(original)
    def extend(self: Any, other: Any) -> None:
        deltas = _stacked([self, other], [self.batch_size, other.batch_size])
        original(self, other)
        self.rope_deltas = deltas

    return extend


def _extract(original: Any) -> Any:
    @functools.wraps(original)
    def extract(self: Any, idx: int) -> Any:
        row = original(self, idx)
        deltas = getattr(self, "rope_deltas", None)
        row.rope_deltas = None if deltas is None else deltas[idx : idx + 1]
        return row

    return extract
