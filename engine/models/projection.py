"""What a model will need, before any of its weights is read.

The model is built as the loader builds it, on arrays that are never computed: MLX knows their shapes and
types from the headers of the files. So the numbers are those of the model itself, whatever its family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from chairlift.cache.quantized import UnsupportedQuantization
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.weights import weight_bytes
from chairlift.engine.models.loader import cast_weights, context_length, open_model, vocab_size
from chairlift.engine.models.quantization import AUTO, cache_factory
from chairlift.engine.models.sizes import HELD, layer_bytes


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
    """

    weight_bytes: int
    peak_bytes: int
    token_bytes: int
    windows: tuple[tuple[int, int], ...]
    row_bytes: int
    context_length: int

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
        caches = cache_factory(model, kv_cache_dtype)()
        vocab = vocab_size(config, 1)
        model(mx.array([[min(16, vocab - 1)] * HELD]), cache=caches)
    except UnsupportedQuantization as error:
        raise ModelUnavailable(f"--kv-cache-dtype {kv_cache_dtype} is not possible: {error}.") from None
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelUnavailable(f"What {folder.name} will need is not known ({what}).") from None
    token, windows, row = layer_bytes(caches)
    return Projection(
        loaded, max(peak, loaded), token, tuple(sorted(windows.items())), row, context_length(config)
    )
