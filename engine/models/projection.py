"""What a model will need, before any of its weights is read.

The model is built as the loader builds it, on arrays that are never computed: MLX knows their shapes and
types from the headers of the files. So the numbers are those of the model itself, whatever its family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from chairlift.cache.quantized import UnsupportedQuantization
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.device import MlxDevice
from chairlift.engine.memory.guard import headroom
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.memory.weights import weight_bytes
from chairlift.engine.models.loader import (
    cast_weights,
    context_length,
    hidden_size,
    open_model,
    step_tokens,
    vocab_size,
)
from chairlift.engine.models.quantization import AUTO, cache_factory
from chairlift.engine.models.sizes import layer_bytes
from chairlift.engine.models.tokenizer import load_tokenizer

OF_WIDEST, OF_HIDDEN = 4, 24
"""Numbers that a step holds for each of its tokens: of its widest layer's, and between layers. Found so on a
CPU for six small models, dense, hybrid and of experts, within a fifth. A server measures it."""
PROCESS_GROWTH = 20 * 10**6
"""Bytes that a server's process grows by between its tokenizer and its first request (5 to 50 seen)."""


@dataclass(frozen=True, slots=True)
class Projection:
    """
    Attributes:
        weight_bytes: of the model once it is loaded.
        peak_bytes: while it loads.
        token_bytes: of a token of a row, in the layers that keep every token.
        windows: (tokens, bytes of a token) of the layers that keep no more than so many.
        row_bytes: of a row's recurrent states.
        context_length: tokens of prompt and answer together.
        vocab_size: rows of the embedding.
        activation_bytes: of a step of prompt tokens, about.
    """

    weight_bytes: int
    peak_bytes: int
    token_bytes: int
    windows: tuple[tuple[int, int], ...]
    row_bytes: int
    context_length: int
    vocab_size: int
    activation_bytes: int

    @property
    def states(self) -> StateSizes:
        """Of rows that share cohorts, as nearly all models' do."""
        return StateSizes(self.token_bytes, self.windows, self.row_bytes)

    def step_bytes(self, rows: int) -> int:
        """What a server that answers so many requests at once sets apart for steps."""
        return headroom(self.activation_bytes, rows, self.vocab_size)[0]

    def rows(self, rows: int, tokens: int) -> int:
        """Bytes of so many rows of so many tokens, without what blocks of rows leave unused."""
        rings = sum(min(tokens, window) * size for window, size in self.windows)
        return rows * (self.row_bytes + tokens * self.token_bytes + rings)


def project(folder: Path, *, dtype: str | None = None, kv_cache_dtype: str = AUTO) -> Projection:
    """
    Args:
        folder: config.json and safetensors, complete.
        dtype, kv_cache_dtype: as the loader takes them.

    Raises:
        ModelUnavailable: the folder cannot be read as a model, or not served so; one line.
    """
    model, config = open_model(folder, folder.name, lazy=True)
    cast_weights(model, dtype)
    loaded = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    try:
        peak = weight_bytes(folder, dtype or ("float32" if mx.default_device() == mx.cpu else None)).peak
        make_cache, vocab = cache_factory(model, kv_cache_dtype), vocab_size(config, 1)

        def passed(tokens: int) -> tuple[mx.array, list[Any]]:
            caches = make_cache()
            return model(mx.array([[min(16, vocab - 1)] * tokens]), cache=caches), caches

        logits, _ = passed(1)
        token, windows, row = layer_bytes(lambda tokens: passed(tokens)[1])
    except UnsupportedQuantization as error:
        raise ModelUnavailable(f"--kv-cache-dtype {kv_cache_dtype} is not possible: {error}.") from None
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelUnavailable(f"What {folder.name} will need is not known ({what}).") from None
    numbers = OF_WIDEST * _widest(model, vocab) + OF_HIDDEN * hidden_size(config)
    return Projection(
        *(loaded, max(peak, loaded), token, tuple(sorted(windows.items())), row, context_length(config)),
        vocab_size=vocab,
        activation_bytes=step_tokens() * numbers * int(logits.dtype.size),
    )


def process_bytes(folder: Path) -> int:
    """What the process of a server of this model takes beside its weights, where that comes out of the same
    memory, else 0. That is what this one takes, once it has the tokenizer, and a little.

    Raises:
        ModelUnavailable: the tokenizer cannot be loaded; one line.
    """
    load_tokenizer(folder)
    device = MlxDevice()
    return device.footprint() + PROCESS_GROWTH if device.shared else 0


def _widest(model: nn.Module, vocab: int) -> int:
    """Numbers that the widest layer makes of a token, the last one aside."""
    widths = [
        array.shape[-2]
        for name, array in tree_flatten(model.parameters())
        if name.endswith(".weight") and array.ndim >= 2
    ]
    return max((width for width in widths if width != vocab), default=0)
