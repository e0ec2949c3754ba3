"""How one vector is made of a text's tokens: the modules that sentence-transformers keeps beside a model.

Source of the file formats: sentence-transformers' documentation, Creating Custom Models (`modules.json`,
`1_Pooling/config.json`, `2_Dense/config.json`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.embedding.files import read_json, read_weights
from chairlift.engine.errors import ModelUnavailable


class Pooling(StrEnum):
    """sentence-transformers' names."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    MEAN_SQRT = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST = "lasttoken"


_FLAGS: Mapping[str, Pooling] = MappingProxyType(
    {
        "pooling_mode_cls_token": Pooling.CLS,
        "pooling_mode_mean_tokens": Pooling.MEAN,
        "pooling_mode_max_tokens": Pooling.MAX,
        "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT,
        "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
        "pooling_mode_lasttoken": Pooling.LAST,
    }
)
_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = MappingProxyType(
    {
        "Identity": lambda x: x,
        "Tanh": mx.tanh,
        "GELU": nn.gelu,
        "ReLU": nn.relu,
        "Sigmoid": mx.sigmoid,
    }
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer over the pooled vector."""

    weight: mx.array
    """`[outputs, inputs]`"""
    bias: mx.array | None = None
    activation: str = "Identity"

    def __call__(self, vectors: mx.array) -> mx.array:
        out = vectors @ self.weight.T
        if self.bias is not None:
            out = out + self.bias
        return _ACTIVATIONS[self.activation](out)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What comes after the model's last layer, the scaling to length 1 aside: all vectors are scaled."""

    pooling: Pooling | None = None
    """None: the folder does not say."""
    dense: tuple[Dense, ...] = ()


def pool(hidden: mx.array, mask: mx.array, how: Pooling) -> mx.array:
    """Vectors `[texts, hidden]`, float32.

    Args:
        hidden: `[texts, tokens, hidden]`; where the mask is false it is not looked at, and may be no number.
        mask: `[texts, tokens]`, true for tokens and false for padding, which is on the right.
    """
    hidden, there = hidden.astype(mx.float32), mask[:, :, None]
    count = mask.sum(axis=1, keepdims=True).astype(mx.float32)
    match how:
        case Pooling.CLS:
            return hidden[:, 0]
        case Pooling.LAST:
            last = mask.sum(axis=1).astype(mx.int32) - 1
            return mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        case Pooling.MAX:
            return mx.where(there, hidden, -mx.inf).max(axis=1)
        case Pooling.WEIGHTED_MEAN:
            weights = mx.where(mask, mx.arange(1, mask.shape[1] + 1), 0).astype(mx.float32)[:, :, None]
            return (mx.where(there, hidden, 0) * weights).sum(axis=1) / weights.sum(axis=1)
    total = mx.where(there, hidden, 0).sum(axis=1)
    return total / (count if how is Pooling.MEAN else mx.sqrt(count))


def read_pipeline(folder: Path, name: str) -> Pipeline:
    """What `modules.json` says; nothing where there is none.

    Raises:
        ModelUnavailable: a module or a setting that is not known here; `name` is the model's.
    """
    if not (folder / "modules.json").is_file():
        return Pipeline()
    pooling: Pooling | None = None
    dense: list[Dense] = []
    for module in read_json(folder / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = folder / str(module.get("path", ""))
        if kind == "Pooling":
            pooling = _pooling(read_json(path / "config.json", dict), name)
        elif kind == "Dense":
            dense.append(_dense(path, name))
        elif kind not in ("Transformer", "Normalize", "Dropout"):
            raise ModelUnavailable(f"{name} has a module of the kind {kind or '?'}, which is not supported.")
    return Pipeline(pooling, tuple(dense))


def _pooling(config: Mapping[str, object], name: str) -> Pooling:
    said = config.get("pooling_mode")
    if isinstance(said, str) and said in set(Pooling):
        return Pooling(said)
    chosen = [how for flag, how in _FLAGS.items() if config.get(flag)]
    if len(chosen) != 1:
        names = ", ".join(chosen) or "none"
        raise ModelUnavailable(f"{name} pools its tokens in a way that is not supported ({names}).")
    return chosen[0]


def _dense(folder: Path, name: str) -> Dense:
    config = read_json(folder / "config.json", dict)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelUnavailable(f"{name} has a dense layer with {activation}, which is not supported.")
    weights = {key.removeprefix("linear."): array for key, array in read_weights(folder).items()}
    if "weight" not in weights:
        raise ModelUnavailable(f"{name} has a dense layer without a weight.")
    bias = weights.get("bias")
    return Dense(
        weights["weight"].astype(mx.float32), None if bias is None else bias.astype(mx.float32), activation
    )
