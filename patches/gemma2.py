"""Gemma 2's attention takes a mask of any rank.

Upstream, mlx-lm 0.32: `gemma2.Attention` groups query heads, so its scores are 5-d `[rows, kv_heads, repeats,
queries, keys]`, while the mask of a batch is 4-d `[rows, 1, queries, keys]`: numpy's rules then line the
mask's rows up with the heads, an exception at most shapes and wrong answers where the counts agree. It also
groups the keys itself, so it goes by the parts of a step (`chairlift.patches.parts`).
"""

from __future__ import annotations

import functools
from typing import Any

from chairlift.patches.parts import calling_by_parts

VERSIONS = ">=0.32.2,<0.33"
_MARK = "__chairlift_original__"


def patch_gemma2_mask() -> bool:
    """Give 4-d masks the axis that the scores have. Idempotent; False where mlx-lm has no gemma2."""
    try:
        from mlx_lm.models import gemma2
    except ImportError:
        return False
    original = gemma2.Attention.__call__
    if hasattr(original, _MARK):
        return True

    @functools.wraps(original)
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if self.repeats > 1 and getattr(mask, "ndim", 0) == 4:
            mask = mask[:, :, None]
        return original(self, x, mask, cache)

    by_parts = calling_by_parts(call)
    setattr(by_parts, _MARK, original)
    gemma2.Attention.__call__ = by_parts
    return True


def undo_gemma2_mask() -> None:
    """Put the original back."""
    from mlx_lm.models import gemma2

    gemma2.Attention.__call__ = getattr(gemma2.Attention.__call__, _MARK, gemma2.Attention.__call__)
