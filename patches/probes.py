"""Short probes of the unpatched upstream: whether a fault that a patch mends is there."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx


class _Keys:
    """Stands for a batch's view of keys."""

    def attend(self, queries: mx.array, **_: Any) -> mx.array:
        return queries


def attention_takes_arrays_only(base: str) -> bool:
    """Whether `scaled_dot_product_attention` of the module `base` refuses keys that attend by themselves."""
    function = importlib.import_module(base).scaled_dot_product_attention
    queries = mx.zeros((1, 1, 1, 8))
    try:
        function(queries, _Keys(), _Keys(), cache=None, scale=1.0, mask=None)
    except (TypeError, AttributeError):
        return True
    return False


def gemma2_refuses_batch_masks() -> bool:
    """Whether Gemma 2's attention fails under a mask of three rows and two KV heads."""
    from mlx_lm.models import gemma2

    arguments = gemma2.ModelArgs(
        model_type="gemma2",
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=4,
        head_dim=4,
        rms_norm_eps=1e-5,
        vocab_size=16,
        num_key_value_heads=2,
    )
    layer = gemma2.Attention(arguments)
    try:
        mx.eval(layer(mx.zeros((3, 2, 16)), mx.ones((3, 1, 2, 2), dtype=mx.bool_)))
    except ValueError:
        return True
    return False


def plamo3_forgets() -> bool:
    """Whether PLaMo 3's sliding cache holds fewer tokens than its mask shows to the last one."""
    from mlx_lm.models import plamo3

    window = 4
    arguments = plamo3.ModelArgs.from_dict(
        {
            "model_type": "plamo3",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 16,
            "vocab_size": 16,
            "window_size": window,
            "sliding_window_pattern": 2,
        }
    )
    model = plamo3.Model(arguments)
    (sliding,) = (cache for cache in model.make_cache() if hasattr(cache, "max_size"))
    mask = plamo3.create_attention_mask(
        mx.zeros((1, 4 * window, 16)), None, window_size=window + 1, return_array=True
    )
    return int(sliding.max_size) < int(mask[-1].sum().item())
