"""LongCat's n-gram embedding keeps a history of n - 1 tokens from the first step on.

Upstream, mlx-lm 0.32: the history of a row that has seen fewer tokens is shorter, so rows cannot be
stacked. Missing tokens count as token 0 (`_shift_right` fills with zeros), so a history that starts with
zeros is the same.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.32.2,<0.33"


def _full_history(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, input_ids: mx.array, cache: Any = None) -> Any:
        if cache is not None and cache[0] is None:
            cache[0] = mx.zeros((input_ids.shape[0], self.n - 1), dtype=mx.int64)
        return original(self, input_ids, cache)

    return call


HISTORY = (Replacement("mlx_lm.models.longcat_flash_ngram", "NgramEmbedding", "__call__", _full_history),)
