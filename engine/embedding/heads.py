"""What makes a score of a cross-encoder's last hidden states.

Sources: the `*ForSequenceClassification` classes of transformers, and for the function over the score
sentence-transformers' `CrossEncoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.embedding.families import Config
from chairlift.engine.embedding.pooling import Pooling, pool
from chairlift.engine.errors import ModelUnavailable

Weights = Mapping[str, mx.array]
Head = Callable[[mx.array, mx.array], mx.array]
"""(last hidden states, mask) to `[texts, width]`."""

SEQUENCE_CLASSIFICATION = "ForSequenceClassification"
_FUNCTIONS: Mapping[str, Callable[[mx.array], mx.array]] = MappingProxyType(
    {"Sigmoid": mx.sigmoid, "Identity": lambda x: x}
)


def is_cross_encoder(config: Config) -> bool:
    architectures = config.get("architectures") or ()
    return any(str(name).endswith(SEQUENCE_CLASSIFICATION) for name in architectures)


def score_head(config: Config, weights: Weights, layers: Any, name: str) -> Head:
    """The head of a model with one label.

    Args:
        weights: of the whole model, under the names in its files.

    Raises:
        ModelUnavailable: several labels, or a head that is not known here; `name` is the model's.
    """
    family = str(config["model_type"])
    logits = _LOGITS.get(family)
    if logits is None:
        raise ModelUnavailable(f"{name} ({family}) scores in a way that is not supported.")
    if any(key.startswith(("classifier.", "head.")) and key.endswith(".scales") for key in weights):
        raise ModelUnavailable(f"{name} has a quantized head, which is not supported.")
    function = score_function(config, name)
    try:
        last = weights["classifier.out_proj.weight" if family in _ROBERTA else "classifier.weight"]
        if last.shape[0] != 1:
            raise ModelUnavailable(
                f"{name} sorts texts into {last.shape[0]} classes; only models of one score are served."
            )
        head = logits(config, weights, layers)
    except KeyError as error:
        raise ModelUnavailable(f"{name} lacks a weight of its head: {error.args[0]}.") from error

    def score(hidden: mx.array, mask: mx.array) -> mx.array:
        return function(head(hidden, mask).astype(mx.float32))

    return score


def score_function(config: Config, name: str) -> Callable[[mx.array], mx.array]:
    """Sigmoid, unless the configuration names another."""
    said = (config.get("sentence_transformers") or {}).get("activation_fn") or config.get(
        "sbert_ce_default_activation_function", "Sigmoid"
    )
    kind = str(said).rpartition(".")[2]
    if kind not in _FUNCTIONS:
        raise ModelUnavailable(f"{name} puts {kind} over its scores, which is not supported.")
    return _FUNCTIONS[kind]


def _linear(weights: Weights, name: str, inputs: mx.array) -> mx.array:
    out = inputs @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def _bert(config: Config, weights: Weights, layers: Any) -> Head:
    return lambda hidden, mask: _linear(weights, "classifier", layers.pooler(hidden))


def _roberta(config: Config, weights: Weights, layers: Any) -> Head:
    def logits(hidden: mx.array, mask: mx.array) -> mx.array:
        first = mx.tanh(_linear(weights, "classifier.dense", hidden[:, 0]))
        return _linear(weights, "classifier.out_proj", first)

    return logits


def _modernbert(config: Config, weights: Weights, layers: Any) -> Head:
    how = Pooling(config.get("classifier_pooling", "cls"))
    epsilon = float(config.get("norm_eps", 1e-5))
    scale = weights["head.norm.weight"]

    def logits(hidden: mx.array, mask: mx.array) -> mx.array:
        dense = nn.gelu(_linear(weights, "head.dense", pool(hidden, mask, how)))
        normed = mx.fast.layer_norm(dense, scale, weights.get("head.norm.bias"), epsilon)
        return _linear(weights, "classifier", normed)

    return logits


_ROBERTA = frozenset({"roberta", "xlm-roberta"})
_LOGITS: Mapping[str, Callable[[Config, Weights, Any], Head]] = MappingProxyType(
    {"bert": _bert, "roberta": _roberta, "xlm-roberta": _roberta, "modernbert": _modernbert}
)
SCORED_FAMILIES = frozenset(_LOGITS)
"""Of which cross-encoders are served."""
