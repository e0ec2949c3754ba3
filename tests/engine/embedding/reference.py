"""BERT in numpy, float64, one text at a time: written from the papers' formulas, for comparison.

Sources: Devlin et al. 2018 (BERT), Reimers and Gurevych 2019 (mean pooling).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Weights = Mapping[str, Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    out: Array = x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    return out


def layer_norm(x: Array, weights: Weights, name: str, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    out: Array = scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return out


def linear(x: Array, weights: Weights, name: str) -> Array:
    out: Array = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return out


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    out: Array = powers / powers.sum(-1, keepdims=True)
    return out


def hidden_states(
    weights: Weights,
    config: Mapping[str, Any],
    token_ids: Sequence[int],
    type_ids: Sequence[int] = (),
    first_position: int = 0,
) -> Array:
    """`[tokens, hidden]`. `first_position`: of the table of positions; RoBERTa's begins at 2."""
    epsilon, heads = config["layer_norm_eps"], config["num_attention_heads"]
    places = np.arange(len(token_ids)) + first_position
    x = (
        weights["embeddings.word_embeddings.weight"][list(token_ids)]
        + weights["embeddings.position_embeddings.weight"][places]
        + weights["embeddings.token_type_embeddings.weight"][list(type_ids) or [0] * len(token_ids)]
    )
    x = layer_norm(x, weights, "embeddings.LayerNorm", epsilon)
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        query, key, value = (
            linear(x, weights, f"{layer}.attention.self.{part}").reshape(len(x), heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        seen = softmax(query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])) @ value
        seen = linear(seen.swapaxes(0, 1).reshape(len(x), -1), weights, f"{layer}.attention.output.dense")
        x = layer_norm(x + seen, weights, f"{layer}.attention.output.LayerNorm", epsilon)
        grown = gelu(linear(x, weights, f"{layer}.intermediate.dense"))
        x = layer_norm(
            x + linear(grown, weights, f"{layer}.output.dense"), weights, f"{layer}.output.LayerNorm", epsilon
        )
    return x


def unit(x: Array) -> Array:
    out: Array = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return out
