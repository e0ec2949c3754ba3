"""PLaMo 3's sliding-window layers keep as many tokens as their mask shows.

Upstream, mlx-lm 0.32: a prompt is prefilled under a window of `window_size + 1` tokens while the cache keeps
`window_size`, so an answer depends on where its prompt's chunks end. The cache is given the missing token.
"""

from __future__ import annotations

import functools
from typing import Any

VERSIONS = ">=0.32.2,<0.33"
_MARK = "__chairlift_original__"


def patch_plamo3_window() -> bool:
    """Make the cache hold `window_size + 1` tokens. Idempotent; False where mlx-lm has no plamo3."""
    try:
        from mlx_lm.models import plamo3
        from mlx_lm.models.cache import KVCache, RotatingKVCache
    except ImportError:
        return False
    original = plamo3.Model.make_cache
    if hasattr(original, _MARK):
        return True

    @functools.wraps(original)
    def make_cache(self: Any) -> list[Any]:
        window = self.config.window_size + 1
        return [KVCache() if layer.full_attn else RotatingKVCache(max_size=window) for layer in self.layers]

    setattr(make_cache, _MARK, original)
    plamo3.Model.make_cache = make_cache
    return True


def undo_plamo3_window() -> None:
    """Put the original back."""
    from mlx_lm.models import plamo3

    plamo3.Model.make_cache = getattr(plamo3.Model.make_cache, _MARK, plamo3.Model.make_cache)
