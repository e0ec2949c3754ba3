"""Attention modules that do arithmetic on keys are called once for each part of a step.

Upstream, mlx-lm 0.32: these modules cast, tile, multiply or choose among the keys and values that a cache
returns, so a batch cannot give them a view that attends by itself (`chairlift.patches.attention`). Their
caches' views offer `by_parts` instead: the module runs as it is, for the rows of a cohort or one row's
chunk at a time, on arrays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.32.2,<0.33"
MODELS = "mlx_lm.models."

LATENT = (
    ("deepseek_v3", "DeepseekV3Attention"),
    ("glm4_moe_lite", "Glm4MoeLiteAttention"),
    ("kimi_linear", "KimiMLAAttention"),
    ("kimi_k3", "KimiK3MLAAttention"),
    ("longcat_flash", "LongcatFlashMLA"),
    ("mistral4", "Mistral4Attention"),
    ("bailing_hybrid", "MultiLatentAttention"),
    ("bailing_moe_v3", "BailingMLA"),
)
"""Multi-head latent attention: keys are made from a latent."""

CHOSEN = (("deepseek_v32", "DeepseekV32Attention"),)
"""Attention to the keys that an indexer chooses (glm_moe_dsa too)."""

ALONE = (("minimax_m3_vl", "Attention"),)
"""Keys are chosen by blocks that end with the longest row's last one: one row at a time."""

CASTING = (
    ("phi", "PhiAttention"),
    ("phixtral", "RoPEAttention"),
    ("stablelm", "Attention"),
    ("plamo", "Attention"),
    ("plamo2", "Attention"),
)
"""Cast or tile keys and values, or call the fused attention itself."""


def calling_by_parts(original: Callable[..., Any], *, alone: bool = False) -> Callable[..., Any]:
    """An attention module's `__call__` that goes by parts where its cache offers that.

    Args:
        original: `(self, x, mask, cache, …)`, with other arguments that are `[rows, …]` arrays or constant.
        alone: it takes one row at a time.
    """
    names = tuple(inspect.signature(original).parameters)[1:]
    mask_name = next(name for name in names if "mask" in name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = {**dict(zip(names, args, strict=False)), **kwargs}
        parts = getattr(told.get("cache"), "by_parts", None)
        if parts is None:
            return original(self, *args, **kwargs)
        mask = told.pop(mask_name, None)
        del told["cache"]
        arrays = {name: value for name, value in told.items() if isinstance(value, mx.array)}

        def attention(part: Sequence[mx.array], mask: Any, cache: Any) -> Any:
            given = {**told, **dict(zip(arrays, part, strict=True)), mask_name: mask, "cache": cache}
            return original(self, **given)

        return parts(attention, mask, list(arrays.values()), alone=alone)

    return call


def _replacements(classes: Sequence[tuple[str, str]], *, alone: bool = False) -> tuple[Replacement, ...]:
    make = functools.partial(calling_by_parts, alone=alone)
    return tuple(Replacement(MODELS + module, owner, "__call__", make) for module, owner in classes)


LATENT_PARTS = _replacements(LATENT)
CHOSEN_PARTS = _replacements(CHOSEN) + _replacements(ALONE, alone=True)
CASTING_PARTS = _replacements(CASTING)
