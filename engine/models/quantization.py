"""Whether a model's keys and values may be kept quantized, found by trying it on the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from chairlift.cache.quantized import BITS, UnsupportedQuantization, quantized_caches
from chairlift.engine.batching import Batching
from chairlift.engine.models.batching import Trial

AUTO = "auto"
"""The model's own type."""
KV_TYPES = (AUTO, *BITS)

_TOLERANCE = {8: 0.05, 4: 0.3}
"""Largest difference of logits, as a share of the largest, by bits: where rounding falls to the other side of
a step, a number moves by all of it, and an expert chosen by a hair gives way to another."""

_UNSHARED = {
    Batching.DENSE: "its attention does arithmetic on the keys themselves",
    Batching.ROWS: "its attention takes one row at a time",
    Batching.SOLO: "its requests are answered one at a time, on caches of their own",
}


def cache_factory(model: nn.Module, kv_cache_dtype: str = AUTO) -> Callable[[], list[Any]]:
    """Makes fresh caches for one request, whose keys and values are kept in a type of `KV_TYPES`.

    Raises:
        UnsupportedQuantization: the model's caches cannot be.
    """
    if kv_cache_dtype == AUTO:
        return lambda: list(make_prompt_cache(model))
    bits = BITS[kv_cache_dtype]

    def make() -> list[Any]:
        return quantized_caches(make_prompt_cache(model), bits)

    make()
    return make


def require_quantizable(model: nn.Module, vocab_size: int, batching: Batching, kv_cache_dtype: str) -> None:
    """Run a few rows on quantized caches, alone through the model's own attention and together in a batch.

    Raises:
        UnsupportedQuantization: it cannot be done, or they differ by more than rounding.
    """
    make_cache = cache_factory(model, kv_cache_dtype)
    if batching in _UNSHARED:
        raise UnsupportedQuantization(_UNSHARED[batching])
    try:
        trial = Trial(model, vocab_size, make_cache, _TOLERANCE[BITS[kv_cache_dtype]])
    except UnsupportedQuantization:
        raise
    except Exception as error:
        raise UnsupportedQuantization(f"its attention cannot read them ({type(error).__name__})") from error
    objection = trial.objection(batching)
    if objection is not None:
        raise UnsupportedQuantization(f"rows in a batch differ from rows alone: {objection}")
