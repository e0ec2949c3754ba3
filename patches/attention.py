"""The seam: `scaled_dot_product_attention` lets keys that are no array attend by themselves.

Upstream: mlx_lm.models.base 0.32 (and mlx_vlm.models.base 0.7) call `mx.fast.scaled_dot_product_attention`
on the arrays that a cache returned. Our batch returns a view with an `attend` method instead, so that
attention can run per cohort while the rest of the model runs on the whole batch. Models import the function
by name, so it is replaced in every module that holds it; those imported later find it in `base`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

_MARK = "__chairlift_original__"
BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")


def apply_attention_seam(bases: tuple[str, ...] = BASES[:1]) -> bool:
    """Route attention over batch views to the views. Idempotent.

    Returns:
        True where the seam is in place, False where a base module is absent.
    """
    found = True
    for name in bases:
        try:
            base = importlib.import_module(name)
        except ImportError:
            found = False
            continue
        original = base.scaled_dot_product_attention
        if not hasattr(original, _MARK):
            _replace(name.rpartition(".")[0], original, _seam(original))
        else:
            _replace(name.rpartition(".")[0], getattr(original, _MARK), original)
    return found


def undo_attention_seam(bases: tuple[str, ...] = BASES) -> None:
    """Put the originals back."""
    for name in bases:
        base = sys.modules.get(name)
        seam = getattr(base, "scaled_dot_product_attention", None)
        if hasattr(seam, _MARK):
            _replace(name.rpartition(".")[0], seam, getattr(seam, _MARK))


def _seam(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        attend = getattr(keys, "attend", None)
        if attend is None:
            return original(queries, keys, values, cache, scale, mask, *args, **kwargs)
        sinks = args[0] if args else kwargs.get("sinks")
        return attend(queries, scale=scale, mask=mask, sinks=sinks)

    setattr(scaled_dot_product_attention, _MARK, original)
    return scaled_dot_product_attention


def _replace(package: str, old: Any, new: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(package + ".") and vars(module).get("scaled_dot_product_attention") is old:
            vars(module)["scaled_dot_product_attention"] = new
