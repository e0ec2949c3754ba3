"""The cache classes of both packages, by kind.

mlx-lm's models make caches of `mlx_lm.models.cache`, mlx-vlm's of `mlx_vlm.models.cache`: classes of the same
names and fields, but neither package takes the other's. Storage here serves both; a row that leaves the batch
gets its own package's class back.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

MLX_VLM = "mlx_vlm.models.cache"


class Kind(Enum):
    """What a layer's cache holds; the value is the name of its class in either package."""

    FULL = "KVCache"
    ROTATING = "RotatingKVCache"
    RECURRENT = "ArraysCache"
    NESTED = "CacheList"


def kind_of(cache: Any) -> Kind | None:
    """The kind of a single request's cache, None for any other.

    mlx-vlm is looked up where it is loaded already: a model of it could not be here otherwise. Its own
    subclasses (buffered or shared variants) store differently and are of no kind.
    """
    mlx_vlm_cache = sys.modules.get(MLX_VLM)
    for kind in Kind:
        if isinstance(cache, getattr(mlx_lm_cache, kind.value)):
            return kind
        if mlx_vlm_cache is not None and type(cache) is getattr(mlx_vlm_cache, kind.value):
            return kind
    return None
