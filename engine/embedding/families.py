"""The model families of mlx-embeddings that are served, and how their last hidden states are had.

mlx-embeddings 0.1 gives the layers. What comes after them is done here (`pooling.py`, `heads.py`): its models
pool by the mean whatever the folder says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.embedding.pooling import Pooling
from chairlift.engine.errors import ModelUnavailable

Config = Mapping[str, Any]
Settings = tuple[tuple[str, object], ...]
Hidden = Callable[[Any, mx.array, mx.array, mx.array], mx.array]
"""(model, token ids, type ids, mask) to the last hidden states `[texts, tokens, hidden]`. All three are
`[texts, tokens]`, padded on the right; the mask is true for tokens."""

MASKED = -1e9
"""Added to the scores of padding. Finite: a row in which everything is masked must not be NaN, since it would
spread; beyond float16, which such families are not computed in."""


@dataclass(frozen=True, slots=True)
class Family:
    module: str
    """Of mlx_embeddings.models."""
    model: str
    """The class of the layers in it."""
    hidden: Hidden
    prefixes: tuple[str, ...]
    """What names of weights begin with where the layers are part of a bigger model."""
    pooling: Pooling
    """Where the folder does not say."""
    float16: bool = True
    """False: computed in float32 instead."""
    positions_from: int = 0
    """First row of the table of positions that a token takes, where there is a table."""
    pooler: bool = False
    """There is a layer over the first token, for cross-encoders only."""
    expects: Settings = ()
    """Settings that the layers take for granted: others are refused. Absent ones pass."""
    requires: Settings = ()
    """Settings that must be there."""


def _bert(model: Any, ids: mx.array, types: mx.array, mask: mx.array) -> mx.array:
    numbers = mask.astype(model.embeddings.LayerNorm.weight.dtype)
    states: mx.array = model(ids, token_type_ids=types, attention_mask=numbers).last_hidden_state
    return states


def _modernbert(model: Any, ids: mx.array, types: mx.array, mask: mx.array) -> mx.array:
    states: mx.array = model(ids, attention_mask=mask.astype(model.final_norm.weight.dtype))[
        "last_hidden_state"
    ]
    return states


def _qwen3(model: Any, ids: mx.array, types: mx.array, mask: mx.array) -> mx.array:
    # Causal, and padded on the right: no token sees padding.
    states: mx.array = model(ids)
    return states


def _llama(model: Any, ids: mx.array, types: mx.array, mask: mx.array) -> mx.array:
    states: mx.array = model(ids, _additive(mask[:, None, None, :], model.norm.weight.dtype))
    return states


def _gemma3(model: Any, ids: mx.array, types: mx.array, mask: mx.array) -> mx.array:
    """As `Gemma3Model`, with the window that its local layers have: upstream lets them see everything, which
    is another model for texts of more than half a window."""
    config = model.config
    states = model.embed_tokens(ids)
    states = states * mx.array(config.hidden_size**0.5, states.dtype)
    places = mx.arange(ids.shape[1])
    near = mx.abs(places[:, None] - places[None, :]) <= config.sliding_window // 2
    everywhere = mask[:, None, None, :]
    wide, local = (_additive(seen, states.dtype) for seen in (everywhere, everywhere & near))
    for index, layer in enumerate(model.layers):
        last_of_pattern = index % config.sliding_window_pattern == config.sliding_window_pattern - 1
        states = layer(states, wide if last_of_pattern else local, None)
    normed: mx.array = model.norm(states)
    return normed


def _additive(seen: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.where(seen, 0.0, MASKED).astype(dtype)


_BERT_LIKE: Settings = (
    ("hidden_act", "gelu"),
    ("position_embedding_type", "absolute"),
    ("is_decoder", False),
)
_XLM_ROBERTA = Family(
    "xlm_roberta",
    "Model",
    _bert,
    ("roberta.",),
    Pooling.MEAN,
    positions_from=2,
    pooler=True,
    expects=(*_BERT_LIKE, ("pad_token_id", 1)),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": Family("bert", "Model", _bert, ("bert.",), Pooling.MEAN, pooler=True, expects=_BERT_LIKE),
        "xlm-roberta": _XLM_ROBERTA,
        "roberta": _XLM_ROBERTA,
        "modernbert": Family(
            "modernbert",
            "ModernBertModel",
            _modernbert,
            ("model.",),
            Pooling.MEAN,
            float16=False,
            expects=(("hidden_activation", "gelu"),),
        ),
        "qwen3": Family(
            "qwen3",
            "Qwen3Model",
            _qwen3,
            ("model.",),
            Pooling.LAST,
            expects=(("hidden_act", "silu"), ("use_sliding_window", False)),
        ),
        "gemma3_text": Family(
            "gemma3_text",
            "Gemma3Model",
            _gemma3,
            ("model.",),
            Pooling.MEAN,
            float16=False,
            requires=(("use_bidirectional_attention", True),),
        ),
        "llama_bidirec": Family(
            "llama_bidirec", "LlamaBidirectionalModel", _llama, ("model.",), Pooling.MEAN, float16=False
        ),
    }
)
"""By `model_type` of the configuration."""


def family_of(config: Config, name: str) -> Family:
    """Raises: ModelUnavailable: a family, or a member of one, that is not served; `name` is the model's."""
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelUnavailable(
            f"{name} ({kind or 'of no family'}) makes no embeddings here; families: {known}."
        )
    wrong = [
        (key, wanted)
        for key, wanted in family.expects
        if config.get(key) is not None and config[key] != wanted
    ] + [(key, wanted) for key, wanted in family.requires if config.get(key) != wanted]
    for key, wanted in wrong:
        raise ModelUnavailable(
            f"{name} ({kind}) cannot be served: its {key} is {config.get(key)}, and {wanted} is supported."
        )
    return family


def make_layers(family: Family, config: Config) -> nn.Module:
    """The layers, with random weights.

    Raises:
        ModelUnavailable: mlx-embeddings is not installed.
    """
    try:
        module = importlib.import_module(f"mlx_embeddings.models.{family.module}")
    except ModuleNotFoundError as error:
        raise ModelUnavailable(
            "An embedding model needs the package mlx-embeddings: pip install 'chairlift[embeddings]'."
        ) from error
    layers: nn.Module = getattr(module, family.model)(module.ModelArgs.from_dict(dict(config)))
    return layers
