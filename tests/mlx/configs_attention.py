"""Small configurations of families with plain attention, dense or with experts."""

from __future__ import annotations

from tests.mlx.configs import VOCABULARY, Config, dense, experts, text

DENSE: dict[str, Config] = {
    "llama": dense(),
    "qwen2": dense(tie_word_embeddings=True),
    "qwen3": dense(),
    "apertus": dense(post_norm=True, qk_norm=True),
    "cohere": dense(use_qk_norm=True, logit_scale=1.0),
    "ernie4_5": dense(use_bias=False),
    "exaone": dense(num_layers=2, layer_norm_epsilon=1e-5),
    "gemma": dense(),
    "gemma2": dense(query_pre_attn_scalar=16.0),
    "glm": dense(tie_word_embeddings=False),
    "glm4": dense(partial_rotary_factor=0.5),
    "gpt2": dense(
        n_ctx=4096,
        n_embd=64,
        n_head=4,
        n_layer=2,
        n_positions=4096,
        layer_norm_epsilon=1e-5,
        num_key_value_heads=4,
    ),
    "gpt_bigcode": dense(
        n_embd=64,
        n_layer=2,
        n_inner=96,
        n_head=4,
        n_positions=4096,
        layer_norm_epsilon=1e-5,
        num_key_value_heads=1,
    ),
    "gpt_neox": dense(rotary_emb_base=10000, rotary_pct=0.5, num_key_value_heads=4),
    "gptj": dense(n_embd=64, n_head=4, n_layer=2, n_positions=4096, rotary_dim=8, layer_norm_epsilon=1e-5),
    "granite": dense(
        logits_scaling=1.0, attention_multiplier=0.25, embedding_multiplier=1.0, residual_multiplier=1.0
    ),
    "helium": dense(),
    "hunyuan_v1_dense": dense(rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "dynamic"}),
    "internlm2": dense(),
    "internlm3": dense(rope_scaling={"factor": 2.0, "rope_type": "dynamic"}),
    "lille-130m": dense(block_size=4096, n_embd=64, n_head=4, n_kv_heads=2, n_layer=2),
    "mimo": dense(num_nextn_predict_layers=0),
    "minicpm": dense(dim_model_base=64, scale_depth=1.4, scale_emb=1.0),
    "nanbeige": dense(num_loops=2),
    "nanochat": dense(num_key_value_heads=4),
    "nemotron": dense(hidden_act="relu2", norm_eps=1e-5),
    "nemotron-nas": dense(
        num_hidden_layers=3,
        hidden_act="silu",
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    ),
    "olmo2": dense(),
    "openelm": dense(
        num_transformer_layers=2,
        model_dim=64,
        ffn_dim_divisor=16,
        num_query_heads=[4, 4],
        num_kv_heads=[2, 1],
        ffn_multipliers=[1.0, 2.0],
    ),
    "phi": dense(partial_rotary_factor=0.5),
    "phi3": dense(
        rope_scaling={"type": "longrope", "long_factor": [1.5] * 8, "short_factor": [1.0] * 8},
        original_max_position_embeddings=2048,
    ),
    "pixtral": text(dense(model_type="llama")),
    "plamo": dense(n_shared_head=2),
    "qwen": dense(kv_channels=16, num_key_value_heads=4, layer_norm_epsilon=1e-5),
    "qwen2_vl": text(dense(model_type="qwen2")),
    "qwen3_vl": text(dense(model_type="qwen3")),
    "seed_oss": dense(tie_word_embeddings=False),
    "smollm3": dense(num_hidden_layers=4),
    "stablelm": dense(use_qkv_bias=True, partial_rotary_factor=0.5, qk_layernorm=True),
    "starcoder2": dense(),
    "talkie": dense(),
    "telechat3": dense(),
}

EXPERT: dict[str, Config] = {
    "mixtral": experts(),
    "Klear": experts(),
    "bailing_moe": experts(),
    "dbrx": dense(
        d_model=64,
        n_layers=2,
        n_heads=4,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ),
    "deepseek": experts(),
    "dots1": experts(scoring_func="noaux_tc"),
    "ernie4_5_moe": experts(
        use_bias=False, moe_num_experts=4, moe_layer_start_index=1, moe_k=2, moe_num_shared_experts=1
    ),
    "glm4_moe": experts(rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5),
    "granitemoe": experts(
        logits_scaling=1.0, attention_multiplier=0.25, embedding_multiplier=1.0, residual_multiplier=1.0
    ),
    "hunyuan": experts(
        num_hidden_layers=4,
        moe_topk=2,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    ),
    "minimax": experts(shared_intermediate_size=32, rotary_dim=8),
    "minimax_m3_vl": text(
        experts(
            num_hidden_layers=3,
            dense_intermediate_size=96,
            shared_intermediate_size=32,
            mlp_layer_types=["dense", "sparse", "sparse"],
            sparse_attention_config={
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1],
            },
        )
    ),
    "olmoe": experts(),
    "phimoe": experts(
        rope_scaling={
            "type": "longrope",
            "long_factor": [1.5] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.2,
            "short_mscale": 1.2,
        }
    ),
    "phixtral": dense(
        num_vocab=VOCABULARY,
        model_dim=64,
        num_heads=4,
        num_layers=2,
        rotary_dim=8,
        num_experts_per_tok=2,
        num_local_experts=4,
    ),
    "qwen2_moe": experts(),
    "qwen3_moe": experts(),
    "qwen3_vl_moe": text(experts(model_type="qwen3_moe")),
    "solar_open": experts(partial_rotary_factor=0.5, use_qk_norm=True),
}
