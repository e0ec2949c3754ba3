"""A runner over a model object, however it came about. Runs on the MLX thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.batching import FLAT_STEPS, Batching
from chairlift.engine.models.batching import Finding, find_batching, split_head
from chairlift.engine.models.prefix import find_pages
from chairlift.engine.models.quantization import AUTO, cache_factory, require_quantizable
from chairlift.engine.runner import MlxRunner
from chairlift.engine.sampling import Marks
from chairlift.engine.sight import Sight
from chairlift.patches import apply_patches


def make_runner(
    model: nn.Module,
    vocab_size: int,
    batching: Batching | None = None,
    sight: Sight | None = None,
    *,
    kv_cache_dtype: str = AUTO,
    marks: Marks | None = None,
) -> tuple[Finding, MlxRunner]:
    """A runner over an mlx-lm model, or one called as such.

    Args:
        batching: None finds the fastest way that is right.
        sight: encodes images.
        kv_cache_dtype: of `KV_TYPES`.
        marks: tokens that sampling treats apart.

    Raises:
        UnsupportedQuantization: the model's keys and values cannot be kept in that type.
    """
    apply_patches()
    finding = Finding(batching) if batching is not None else find_batching(model, vocab_size)
    if kv_cache_dtype != AUTO:
        require_quantizable(model, vocab_size, finding.batching, kv_cache_dtype)
    split = split_head(model, vocab_size) if finding.batching in FLAT_STEPS else None

    def forward(tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        logits: mx.array = model(tokens, cache=caches, **told)
        return logits

    make_cache = cache_factory(model, kv_cache_dtype)
    pages = None if finding.whole_prompts else find_pages(model, vocab_size, make_cache)
    runner = MlxRunner(
        forward,
        make_cache,
        finding.batching,
        split=split,
        whole_prompts=finding.whole_prompts,
        sight=sight,
        marks=marks,
        pages=pages,
    )
    return finding, runner
