"""A runner over a model object, however it came about. Runs on the MLX thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.models.batching import Finding, find_batching, split_head
from chairlift.engine.runner import FLAT_STEPS, Batching, MlxRunner
from chairlift.engine.sight import Sight
from chairlift.patches import apply_patches


def make_runner(
    model: nn.Module, vocab_size: int, batching: Batching | None = None, sight: Sight | None = None
) -> tuple[Finding, MlxRunner]:
    """A runner over an mlx-lm model, or one called as such; `batching` None finds the fastest way that is
    right, `sight` encodes images."""
    apply_patches()
    finding = Finding(batching) if batching is not None else find_batching(model, vocab_size)
    split = split_head(model, vocab_size) if finding.batching in FLAT_STEPS else None

    def forward(tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        logits: mx.array = model(tokens, cache=caches, **told)
        return logits

    runner = MlxRunner(
        forward,
        lambda: make_prompt_cache(model),
        finding.batching,
        split=split,
        whole_prompts=finding.whole_prompts,
        sight=sight,
    )
    return finding, runner
