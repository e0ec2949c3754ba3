"""Configurations of small models, one for each family: real configuration files, shrunk.

A configuration holds the family's own fields over one of the bases here. mlx-lm's `ModelArgs.from_dict` drops
keys that a family does not know, so that a base may hold more than each of its families reads.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

VOCABULARY = 192
WINDOW = 16
"""Sliding windows and attention chunks, in tokens: short, so that every test row outgrows them."""

BASE: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}

LATENT: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Multi-head latent attention."""

DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
"""Gated delta rule. mlx-lm's kernels want key heads of a multiple of 32."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _over(*bases: Config, **fields: Any) -> Config:
    return {key: value for base in (*bases, fields) for key, value in base.items()}


def dense(**fields: Any) -> Config:
    return _over(BASE, **fields)


def experts(**fields: Any) -> Config:
    return _over(BASE, EXPERTS, **fields)


def latent(**fields: Any) -> Config:
    return _over(BASE, EXPERTS, LATENT, **fields)


def delta(**fields: Any) -> Config:
    return _over(BASE, EXPERTS, DELTA, **fields)


def text(config: Config) -> Config:
    """The language model of a family that also sees: its fields below `text_config`."""
    return {"text_config": config, "vocab_size": config["vocab_size"]}
