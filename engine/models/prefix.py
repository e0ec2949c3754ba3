"""Whether a model's prefixes can be kept for later rows, found by trying it on the model itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from chairlift.cache.batch import UnsupportedCache
from chairlift.cache.pages import PageFormat
from chairlift.engine.models.batching import TOLERANCE
from chairlift.engine.pages import PageStore
from chairlift.engine.prefix.vocabulary import PrefixSpec

log = logging.getLogger(__name__)

_HELD, _PAGE = 9, 4
"""Tokens of the trial, and of its pages."""


def find_pages(model: nn.Module, vocab_size: int, make_cache: Callable[[], list[Any]]) -> PageStore | None:
    """A store for the model's pages, if a request that begins with restored ones goes on as if it had
    computed them; else None. Runs on the MLX thread."""
    try:
        pages = PageFormat(make_cache())
        caches = make_cache()
        _forward(model, [31 * place % vocab_size for place in range(_HELD)], caches)
        token_bytes, state_bytes = pages.measure(caches)
        restored = _restored(pages, caches)
        logits = [_forward(model, [7 % vocab_size], each) for each in (caches, restored)]
    except UnsupportedCache as error:
        log.info("prefixes are not kept: %s", error)
        return None
    except Exception as error:
        log.warning("prefixes are not kept: trying it failed (%s)", type(error).__name__)
        log.debug("the trial", exc_info=True)
        return None
    want, got = (each.astype(mx.float32) for each in logits)
    tolerance = TOLERANCE.get(logits[0].dtype, 1e-4) * mx.abs(want).max()
    if not (mx.abs(want - got).max() <= tolerance).item():
        log.warning("prefixes are not kept: a restored one goes on differently")
        return None
    return PageStore(pages, _spec(token_bytes, state_bytes))


def _restored(pages: PageFormat, caches: list[Any]) -> list[Any]:
    starts = range(0, _HELD, _PAGE)
    kept = [
        (pages.pack(pages.planes(caches, start, min(start + _PAGE, _HELD))), min(_PAGE, _HELD - start))
        for start in starts
    ]
    state = pages.pack_state(pages.states(caches)) if pages.has_states else None
    return pages.restore(kept, _HELD, state)


def _forward(model: nn.Module, tokens: list[int], caches: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([tokens], dtype=mx.int32), cache=caches)[:, -1]
    mx.eval(logits)
    return logits


def _spec(token_bytes: int, state_bytes: int) -> PrefixSpec:
    """Small blocks on a CPU, where computing a token costs more than handling a block; on a GPU it is the
    other way round."""
    block = 16 if mx.default_device() == mx.cpu else 64
    return PrefixSpec(block, token_bytes, state_bytes, checkpoint_tokens=32 * block)
