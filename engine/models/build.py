"""A runner over a model object, however it came about. Runs on the MLX thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from chairlift.cache.device import on_cuda
from chairlift.cache.prompt_view import prompt_views
from chairlift.engine.batching import FLAT_STEPS, Batching
from chairlift.engine.blas import FEW_TOKENS, find_blas, measured
from chairlift.engine.chunks import Forward
from chairlift.engine.models.batching import Finding, find_batching, split_head, views_agree
from chairlift.engine.models.compiling import compiled_steps
from chairlift.engine.models.image_prefix import Example, with_images
from chairlift.engine.models.images import Eyes
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
    example: Example | None = None,
    kv_cache_dtype: str = AUTO,
    marks: Marks | None = None,
    compiled: bool | None = None,
) -> tuple[Finding, MlxRunner]:
    """A runner over an mlx-lm model, or one called as such.

    Args:
        batching: None finds the fastest way that is right.
        sight: encodes images.
        example: a prompt with an image, on which is tried whether prefixes of such prompts can be kept; None
            keeps none.
        kv_cache_dtype: of `KV_TYPES`.
        marks: tokens that sampling treats apart.
        compiled: compile decode steps of a flat model without images, where that is right; None: on CUDA, the
            only device on which it is known to pay.

    Raises:
        UnsupportedQuantization: the model's keys and values cannot be kept in that type.
    """
    apply_patches()
    finding = Finding(batching) if batching is not None else find_batching(model, vocab_size)
    if kv_cache_dtype != AUTO:
        require_quantizable(model, vocab_size, finding.batching, kv_cache_dtype)
    split = split_head(model, vocab_size) if finding.batching in FLAT_STEPS else None

    alone = finding.batching not in FLAT_STEPS and views_agree(model, vocab_size)

    def forward(tokens: mx.array, caches: list[Any], **told: Any) -> mx.array:
        if alone and tokens.shape[1] > 1:
            caches = prompt_views(caches)
        logits: mx.array = model(tokens, cache=caches, **told)
        return logits

    make_cache = cache_factory(model, kv_cache_dtype)
    blas = find_blas() if mx.default_device() == mx.cpu else None
    pages = None if finding.whole_prompts else find_pages(model, vocab_size, make_cache)
    if pages is not None and pages.spec is not None and isinstance(sight, Eyes) and example is not None:
        pages.spec = with_images(pages.spec, model, sight, make_cache, example)
    if compiled is None:
        compiled = on_cuda()
    compiles = compiled and finding.batching is Batching.FLAT and sight is None
    runner = MlxRunner(
        forward,
        make_cache,
        finding.batching,
        split=split,
        whole_prompts=finding.whole_prompts,
        sight=sight,
        marks=marks,
        pages=pages,
        weights=len(tree_flatten(model.parameters())),
        threads=None if blas is None else measured(blas, partial(_seconds_of_few, forward, make_cache)),
        compiled=compiled_steps(forward, make_cache, vocab_size) if compiles else None,
    )
    return finding, runner


def _seconds_of_few(forward: Forward, make_cache: Callable[[], list[Any]]) -> float:
    """Seconds of a forward of few tokens."""
    tokens, caches = mx.zeros((1, FEW_TOKENS // 2), dtype=mx.int32), make_cache()
    start = time.perf_counter()
    mx.eval(forward(tokens, caches))
    return time.perf_counter() - start
