"""Small random models of mlx-lm's families, for parity tests in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from tests.mlx.configs import Config
from tests.mlx.configs_attention import DENSE, EXPERT
from tests.mlx.configs_recurrent import HYBRID, RECURRENT
from tests.mlx.configs_windowed import MLA, WINDOWED

GAIN = 2.0
"""Standard deviation of a matrix's outputs for inputs of 1."""

EMBEDDING = 0.3
FAINT_EMBEDDING = 0.03
FAINT = frozenset({"gemma", "gemma2", "gemma3n", "gemma4", "gemma4_text", "gear"})
"""Families whose output matrix is the embedding and whose layers add little to it: with embeddings of the
usual size they repeat their last token for ever."""

REMEMBER = {"A_log": -1.0, "dt_bias": -3.0, "dt_proj.bias": -3.0, "recurrent_param": -5.0, "w_lora": -5.0}
"""Means of the parameters that set how fast a state forgets: states here outlive the longest prompt."""

RESEEDED = dict.fromkeys(("cohere", "exaone4", "gemma3n", "minicpm3", "mistral4", "plamo3"), 1)
"""Added to the seed where seed 0 falls into a loop of a token or two."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models and the small configuration that stands for it."""

    name: str
    config: Config


def build(family: Family, seed: int = 0) -> nn.Module:
    """A model of the family with seeded float32 weights.

    mlx-lm's own initialisation is made for training: its answers repeat one token and hardly depend on the
    prompt. Here matrices have `GAIN` over the scale that keeps variance, so that attention and states move
    the answer, embeddings are small against what the layers add, and every vector is shaken a little.
    """
    config = {"model_type": family.name, **family.config}
    model_class, args_class = _get_classes(config)
    seed += RESEEDED.get(family.name, 0)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    embedding = FAINT_EMBEDDING if family.name in FAINT else EMBEDDING
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    weights = [
        (name, _weight(name, value, key, embedding))
        for (name, value), key in zip(parameters, keys, strict=True)
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weight(name: str, value: mx.array, key: mx.array, embedding: float) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape, key=key)
    for suffix, mean in REMEMBER.items():
        if name.endswith(suffix) or (suffix == "w_lora" and ".w_lora." in name and name.endswith("bias")):
            return mean + 0.5 * noise
    if "embed" in name or "wte" in name:
        return embedding * noise
    if value.ndim < 2:
        return value.astype(mx.float32) + 0.1 * noise
    if "dt_proj" in name or "gate_weight" in name or ".w_lora." in name:
        return noise / math.sqrt(value.shape[-1])
    return GAIN / math.sqrt(math.prod(value.shape[1:]) if "conv" in name else value.shape[-1]) * noise


REQUIRED = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "jamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "recurrent_gemma",
    "rwkv7",
    "bailing_moe_linear",
    "olmo_hybrid",
    "baichuan_m1",
)

FAMILIES: dict[str, Family] = {
    name: Family(name, config)
    for group in (DENSE, WINDOWED, EXPERT, MLA, RECURRENT, HYBRID)
    for name, config in group.items()
}

NOT_ON_CPU = {"muse_spark": "its rotary positions are a Metal kernel"}
"""Families whose small model runs on Metal only."""

NOT_BUILT = {
    "bitnet": "its ternary matrix product is a Metal kernel",
    "olmo": "needs the package ai2-olmo, without which importing it ends the process",
    "prism_hadamard_qwen35": "qwen3_5 repacked in 2 bits; made from packed weights only",
}
"""Families of which no small random model is built here, and why."""

ONE_BY_ONE = {"deepseek_v41": "a cache type of its own, with one position for all rows"}
"""Families whose rows share no step, and why."""

MENDED = {
    "phi3small": "upstream adds its mask to the scores instead of applying it, so tokens see later ones "
    "and an answer depends on where its prompt's chunks end",
    "plamo3": "upstream's cache keeps one token fewer than its mask shows, so an answer depends on where "
    "its prompt's chunks end",
}
"""Families whose answers upstream are not well defined, and why: their solo runs are under our patches."""

COARSE = {"deepseek_v41": 0.05}
"""Families that round keys to 8 and 4 bits as they run, and by how much their log probabilities may therefore
move: float32 noise of other matrix shapes flips a step of the rounding."""
