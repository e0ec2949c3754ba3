"""mlx-vlm: what depends on a row's position is made from its own position.

Upstream, mlx-vlm 0.7.10, where `cache.offset` is an array of the rows' offsets. Both faults show only in rows
longer than the length that a model was first trained on, so a short trial does not see them:

- Ministral 3 and Mistral 4 scale every row's queries by the position of the first row, which they read from
  the device in every step;
- the rope of type "longrope" (Phi-3, Phi-3.5-MoE, MiniCPM3) turns all rows by its long factors as soon as
  one of them is long.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import mlx.core as mx

from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.7.10,<0.8"


def row_scale(offset: mx.array, tokens: int, rope: dict[str, Any]) -> mx.array:
    """Factors of the queries, `[rows, 1, tokens, 1]`, as upstream's `_get_llama_4_attn_scale` has them for
    one row. `rope`: the configuration's `rope_parameters`."""
    positions = offset.reshape(-1, 1) + mx.arange(tokens)
    periods = mx.floor(positions / rope["original_max_position_embeddings"])
    scale: mx.array = 1 + rope["llama_4_scaling_beta"] * mx.log(1 + periods)
    return scale[:, None, :, None]


def _scaled(masks: Any) -> Any:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(self: Any, inputs: mx.array, cache: Any = None, inputs_embeds: Any = None) -> Any:
            offset = cache[0].offset if cache is not None and cache[0] is not None else 0
            if not isinstance(offset, mx.array):
                return original(self, inputs, cache, inputs_embeds)
            hidden = inputs_embeds if inputs_embeds is not None else self.embed_tokens(inputs)
            scale = row_scale(offset, hidden.shape[1], self.config.rope_parameters).astype(hidden.dtype)
            for layer, layer_cache, mask in zip(self.layers, cache, masks(self, hidden, cache), strict=True):
                hidden = layer(hidden, scale, mask, cache=layer_cache)
            return self.norm(hidden)

        return call

    return make


def _mask(hidden: mx.array, cache: Any, **window: int) -> Any:
    base: Any = importlib.import_module("mlx_vlm.models.base")
    return base.create_attention_mask(hidden, cache, **window)


def _ministral3_masks(model: Any, hidden: mx.array, cache: Any) -> list[Any]:
    whole = _mask(hidden, cache[model.fa_idx])
    sliding = None
    if model.swa_idx is not None:
        sliding = _mask(hidden, cache[model.swa_idx], window_size=model.sliding_window)
    return [sliding if layer.use_sliding else whole for layer in model.layers]


def _mistral4_masks(model: Any, hidden: mx.array, cache: Any) -> list[Any]:
    return [_mask(hidden, cache[0])] * len(model.layers)


def _longrope(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, x: mx.array, offset: int | mx.array = 0) -> Any:
        """x `[rows, heads, tokens, head_dim]`; offset an integer or int32 `[rows]`."""
        if not isinstance(offset, mx.array) or offset.size == 1:
            return original(self, x, offset)
        end = offset.reshape(-1, 1, 1, 1) + x.shape[-2]
        turned = [
            mx.fast.rope(
                scale.astype(x.dtype) * x[..., : self.dim],
                self.dim,
                traditional=False,
                base=None,
                scale=1.0,
                offset=offset,
                freqs=freqs,
            )
            for scale, freqs in (
                (self._long_scale, self._long_freqs),
                (self._short_scale, self._short_freqs),
            )
        ]
        rotated = mx.where(end > self.original_max_position_embeddings, *turned)
        return mx.concatenate([rotated, x[..., self.dim :]], axis=-1)

    return call


POSITIONS = (
    Replacement("mlx_vlm.models.mistral3.language", "Ministral3", "__call__", _scaled(_ministral3_masks)),
    Replacement("mlx_vlm.models.mistral4.language", "Mistral4Model", "__call__", _scaled(_mistral4_masks)),
    Replacement("mlx_vlm.models.rope_utils", "SuScaledRoPE", "__call__", _longrope),
)
