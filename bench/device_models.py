"""Models of real shapes with random weights, made on the device: speed and memory do not depend on values."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache


@dataclass(frozen=True)
class Shape:
    """A model of mlx-lm by its configuration."""

    name: str
    module: str
    config: dict[str, Any] = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])


def llama(name: str, **changes: int) -> Shape:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **changes,
    }
    return Shape(name, "mlx_lm.models.llama", config)


def qwen3(name: str, **changes: int) -> Shape:
    config = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        **changes,
    }
    return Shape(name, "mlx_lm.models.qwen3", config)


def qwen3_5(name: str, **changes: int) -> Shape:
    """A hybrid: three gated delta layers to one of full attention."""
    config = {
        "model_type": "qwen3_5",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        **changes,
    }
    return Shape(name, "mlx_lm.models.qwen3_5", config)


SHAPES = {shape.name: shape for shape in (qwen3("qwen3-0.6b"), llama("llama-8b"), qwen3_5("qwen3.5-4b"))}

_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_TINY_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
TINY_SHAPES = {
    shape.name: shape
    for shape in (
        qwen3("qwen3-0.6b", **_TINY, head_dim=16),
        llama("llama-8b", **_TINY),
        qwen3_5("qwen3.5-4b", **_TINY, **_TINY_LINEAR, head_dim=16),
    )
}
"""The same families, small enough to try the script itself on a CPU."""


def build(shape: Shape, dtype: mx.Dtype, seed: int = 0) -> nn.Module:
    """A model whose matrices are random and whose vectors (norms, biases, decays) are as mlx-lm starts them.

    mlx is lazy: what the model would have drawn in float32 is replaced before it is computed.
    """
    mx.random.seed(seed)
    module = importlib.import_module(shape.module)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(shape.config))
    drawn = [
        (
            name,
            mx.random.normal(array.shape, dtype=dtype, scale=0.02)
            if array.ndim > 1
            else array.astype(dtype)
            if "A_log" not in name
            else array,
        )
        for name, array in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    return model


def parameter_bytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@dataclass(frozen=True)
class RowBytes:
    """What one row of a model needs, without padding."""

    per_token: int
    """Bytes of keys and values."""
    states: int
    """Bytes of recurrent states, whatever the length."""

    def of(self, lengths: list[int]) -> int:
        return sum(lengths) * self.per_token + len(lengths) * self.states


def row_bytes(model: nn.Module) -> RowBytes:
    """Measured on the model's own caches for one request."""
    caches = make_prompt_cache(model)
    tokens = mx.array([[1, 2, 3, 4]])
    mx.eval(model(tokens, cache=caches))
    per_token = states = 0
    for cache in caches:
        if isinstance(cache, KVCache):
            keys, values = cache.keys_and_values()
            per_token += (keys.nbytes + values.nbytes) // tokens.shape[1]
        elif isinstance(cache, ArraysCache):
            states += sum(array.nbytes for array in cache.cache if array is not None)
        else:
            raise TypeError(f"bytes of a {type(cache).__name__} are not known here")
    return RowBytes(per_token, states)
