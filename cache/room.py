"""Room for a whole prompt at once: a cache that grows chunk by chunk is copied every time, and there twice
while that is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.cache.kinds import Kind, kind_of
from chairlift.cache.quantized import QuantizedRow


def make_room(caches: Sequence[Any], tokens: int) -> None:
    """Have a request's full-attention caches allocate once, for `tokens` tokens, when they take the next.

    mlx-lm's caches grow in steps of `step` tokens: this one's is all that it will need.
    """
    for cache in caches:
        if isinstance(cache, QuantizedRow):
            make_room(cache.parts, tokens)
        elif (kind := kind_of(cache)) is Kind.NESTED:
            make_room(cache.caches, tokens)
        elif kind is Kind.FULL:
            cache.step = max(1, tokens - int(cache.offset))
