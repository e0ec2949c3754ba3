"""What mlx-lm's batch machinery gets wrong for recurrent caches, each fault with a probe and a mend.

A mend is applied only where its probe sees the fault in the mlx-lm that is installed; the probes see all
of them in 0.32.2. Originals are kept, so every mend can be undone.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from chairlift.cache.recurrent_batch import BatchMambaCache

# `mlx_lm.generate` as an attribute of the package is a function of that name.
generate = importlib.import_module("mlx_lm.generate")


def is_recurrent(cache: object) -> bool:
    """A recurrent cache, or a list of caches with one in it."""
    if isinstance(cache, CacheList):
        return any(is_recurrent(part) for part in cache.caches)
    return isinstance(cache, ArraysCache)


def to_batch_cache(cache: Any, left_padding: list[int], max_kv_size: int | None = None) -> Any:
    """The empty batch cache, of rows with `left_padding`, that takes the place of the empty `cache`.

    Full KV becomes `BatchKVCache`, or with `max_kv_size` (tokens) a rotating one of that size; a window
    stays as it is unless `max_kv_size` is smaller; a list of caches is converted part by part.

    Raises:
        ValueError: a cache with content (merge those), a rotating cache that keeps its first tokens
            (mlx-lm's batch cache cannot), or a cache of a type that has no batch form, by its name.
    """
    if isinstance(cache, CacheList):
        return CacheList(*(to_batch_cache(part, left_padding, max_kv_size) for part in cache.caches))
    name = type(cache).__name__
    if not isinstance(cache, ArraysCache) and type(cache) not in (KVCache, RotatingKVCache):
        raise ValueError(f"{name} does not yet support batching")
    if not cache.empty():
        raise ValueError(f"{name} has content: merge it into a batch instead")
    if isinstance(cache, ArraysCache):
        return BatchMambaCache(left_padding, size=len(cache.cache))
    if isinstance(cache, KVCache):
        return BatchKVCache(left_padding) if max_kv_size is None else _rotating(max_kv_size, left_padding)
    if cache.keep > 0:
        raise ValueError(f"{name} with keep={cache.keep} does not yet support batching")
    return _rotating(min(cache.max_size, max_kv_size or cache.max_size), left_padding)


def _rotating(max_size: int, left_padding: list[int]) -> BatchRotatingKVCache:
    return BatchRotatingKVCache(max_size, left_padding)


def make_batch_cache(model: Any, left_padding: list[int], max_kv_size: int | None = None) -> list[Any]:
    """The empty batch cache of every layer of `model`; the seam that mlx-lm once had as
    `mlx_lm.generate._make_cache`. See `to_batch_cache`."""
    caches = model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
    return [to_batch_cache(cache, left_padding, max_kv_size) for cache in caches]


def merge_caches(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """`rows[r][layer]`, the caches of single requests, to one batch cache a layer.

    Raises:
        ValueError: rows of different numbers of layers, a layer whose caches are of different types, or
            of a type that has no batch form, by its name.
    """
    layers = {len(row) for row in rows}
    if len(layers) > 1:
        raise ValueError(f"caches of {' and '.join(map(str, sorted(layers)))} layers cannot share a batch")
    return [_merged(list(layer)) for layer in zip(*rows, strict=True)]


def _merged(caches: list[Any]) -> Any:
    kinds = {CacheList if isinstance(c, CacheList) else _kind(c) for c in caches}
    names = " and ".join(sorted(kind.__name__ for kind in kinds))
    if len(kinds) > 1:
        raise ValueError(f"caches of types {names} cannot share a batch")
    if isinstance(caches[0], CacheList):
        return CacheList(*merge_caches([cache.caches for cache in caches]))
    if isinstance(caches[0], ArraysCache):
        return BatchMambaCache.merge(caches)
    if not hasattr(caches[0], "merge"):
        raise ValueError(f"{names} does not yet support batching with history")
    return caches[0].merge(caches)


def _kind(cache: Any) -> type:
    return ArraysCache if isinstance(cache, ArraysCache) else type(cache)


def bounded_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """`make_prompt_cache`, with `max_kv_size` (tokens) kept by models that mix KV and recurrent layers.

    The rotating caches keep no first tokens, because a batch of them cannot.
    """
    caches: list[Any] = upstream.make_prompt_cache(model, max_kv_size)
    if max_kv_size is None or not any(is_recurrent(cache) for cache in caches):
        return caches
    return [_bounded(cache, max_kv_size) for cache in caches]


def _bounded(cache: Any, max_kv_size: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_bounded(part, max_kv_size) for part in cache.caches))
    return RotatingKVCache(max_kv_size) if type(cache) is KVCache else cache


def prompt_without_padding(batch: Any, tokens: list[list[int]]) -> None:
    """Process prompt tokens of rows that have recurrent layers, none of them padded.

    All rows go through as many tokens as the shortest has, then the longer ones go on without it. The
    batch's caches are rebuilt at the end.

    Raises:
        ValueError: not one list of tokens a row.
    """
    if len(tokens) != len(batch.uids):
        raise ValueError("The batch length doesn't match the number of inputs")
    for known, new in zip(batch.tokens, tokens, strict=True):
        known += new
    caches, live, start = batch.prompt_cache, list(range(len(tokens))), 0
    finished: dict[int, list[Any]] = {}
    for end in sorted({len(row) for row in tokens}):
        for at in range(start, end, batch.prefill_step_size):
            chunk = [tokens[row][at : min(at + batch.prefill_step_size, end)] for row in live]
            batch.model(mx.array(chunk), cache=caches)
            mx.eval([cache.state for cache in caches])
            mx.clear_cache()
        for place, row in enumerate(live):
            if len(tokens[row]) == end:
                finished[row] = [cache.extract(place) for cache in caches]
        stay = [place for place, row in enumerate(live) if len(tokens[row]) > end]
        live, start = [live[place] for place in stay], end
        for cache in caches if stay else []:
            cache.filter(stay)
    batch.prompt_cache = merge_caches([finished[row] for row in sorted(finished)])
    mx.eval([cache.state for cache in batch.prompt_cache])


# Mends

LOCK = threading.Lock()
"""Held while mends are applied or undone."""


@dataclass(frozen=True, slots=True)
class Mend:
    """One replaced attribute of mlx-lm."""

    owner: Any
    name: str
    reason: str
    faulty: Callable[[], bool]
    """Whether the installed mlx-lm has the fault."""
    replacement: Callable[[Any], Any]
    """Makes the new attribute from the original (None where there is none)."""

    @property
    def applied(self) -> bool:
        return hasattr(vars(self.owner).get(self.name), "chairlift_original")

    def apply(self) -> bool:
        """Replace, if the fault is there. True where it is replaced now."""
        if not self.applied and self.faulty():
            original = vars(self.owner).get(self.name)
            new = self.replacement(original)
            new.chairlift_original = original
            setattr(self.owner, self.name, new)
        return self.applied

    def undo(self) -> None:
        """Put the original back, if replaced."""
        if not self.applied:
            return
        original = vars(self.owner)[self.name].chairlift_original
        if original is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, original)


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except (IndexError, TypeError, AttributeError, StopIteration):
        return True
    return False


def _merge_is_faulty() -> bool:
    padded, fresh = ArraysCache(2, left_padding=[3]), ArraysCache(2)
    padded[0] = mx.ones((1, 1))

    def keeps() -> bool:
        merged = ArraysCache.merge([fresh, padded])
        padding = merged.left_padding
        return padding is not None and padding.tolist() == [0, 3] and merged.extract(0) is not None

    return _raises(lambda: ArraysCache.merge([])) or _raises(keeps) or not keeps()


def _merge_caches_is_faulty() -> bool:
    return _raises(lambda: generate._merge_caches([])) or not _refuses_by_name()


def _refuses_by_name() -> bool:
    odd = CacheList(ArraysCache(1), upstream.ChunkedKVCache(8))
    mixed = [[KVCache()], [ArraysCache(1)]]
    for rows, name in (([[odd], [odd]], "ChunkedKVCache"), (mixed, "ArraysCache")):
        try:
            generate._merge_caches(rows)
        except ValueError as error:
            if name not in str(error):
                return False
        except AttributeError:
            return False
        else:
            return False
    return True


class _Hybrid:
    """The least model: one recurrent and one KV layer. Records the tokens it is given."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        self.layers = [None, None]

    def make_cache(self) -> list[Any]:
        return [ArraysCache(1), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows: Any = tokens.tolist()
        self.seen.append(rows)
        cache[0][0] = mx.zeros((len(rows), 1))
        cache[1].update_and_fetch(*(mx.zeros((len(rows), 1, len(rows[0]), 1)),) * 2)
        return mx.zeros((*tokens.shape, 2))


def _prompt_pads() -> bool:
    model = _Hybrid()
    batch = generate.PromptProcessingBatch(model, [0, 1], [model.make_cache(), model.make_cache()])
    batch.prompt([[5], [6, 7]])
    return any(0 in row for rows in model.seen for row in rows)


def _ignores_max_kv_size() -> bool:
    return not isinstance(generate.make_prompt_cache(_Hybrid(), 8)[1], RotatingKVCache)


def _prompt(original: Any) -> Any:
    def prompt(self: Any, tokens: list[list[int]]) -> None:
        even = len({len(row) for row in tokens}) <= 1
        if even or not any(is_recurrent(cache) for cache in self.prompt_cache):
            original(self, tokens)
        else:
            prompt_without_padding(self, tokens)

    return prompt


def _extract(fresh: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def replacement(original: Any) -> Any:
        def extract(self: Any, idx: int) -> Any:
            return fresh(self) if self.keys is None else original(self, idx)

        return extract

    return replacement


def _own(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A new function object for each mend, as the original is kept on it."""

    def replacement(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__doc__ = function.__doc__
        return call

    return replacement


MENDS: tuple[Mend, ...] = (
    Mend(
        ArraysCache,
        "merge",
        "drops padding and lengths, raises on states not written; the batch cannot be extracted from",
        _merge_is_faulty,
        lambda original: classmethod(lambda cls, caches: BatchMambaCache.merge(caches)),
    ),
    Mend(
        BatchKVCache,
        "extract",
        "raises on a batch with nothing written",
        lambda: _raises(lambda: BatchKVCache([0]).extract(0)),
        _extract(lambda batch: KVCache()),
    ),
    Mend(
        BatchRotatingKVCache,
        "extract",
        "raises on a batch with nothing written",
        lambda: _raises(lambda: BatchRotatingKVCache(8, [0]).extract(0)),
        _extract(lambda batch: RotatingKVCache(batch.max_size)),
    ),
    Mend(
        generate,
        "_merge_caches",
        "raises AttributeError on nested caches of a type without a batch form, and merges rows whose "
        "caches are of different types",
        _merge_caches_is_faulty,
        _own(merge_caches),
    ),
    Mend(
        generate,
        "_make_cache",
        "not there (gone since 0.31), or ignores max_kv_size",
        lambda: True,
        _own(make_batch_cache),
    ),
    Mend(
        generate,
        "make_prompt_cache",
        "ignores max_kv_size for models that make their own caches",
        _ignores_max_kv_size,
        _own(bounded_prompt_cache),
    ),
    Mend(
        generate.PromptProcessingBatch,
        "prompt",
        "pads prompts on the right, and eight families let padding flow into their states (mamba, jamba, "
        "nemotron_h, rwkv7, recurrent_gemma, bailing_moe_linear, olmo_hybrid, baichuan_m1)",
        _prompt_pads,
        _prompt,
    ),
    Mend(
        upstream,
        "BatchMambaCache",
        "CacheList.state looks its parts' classes up here",
        lambda: not hasattr(upstream, "BatchMambaCache"),
        lambda original: BatchMambaCache,
    ),
)
