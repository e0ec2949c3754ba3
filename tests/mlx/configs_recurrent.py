"""Small configurations of the families that hold recurrent states, alone or beside attention."""

from __future__ import annotations

from tests.mlx.configs import FULL, LINEAR, SLIDING, WINDOW, Config, delta, dense, experts, latent, text

GROUPED_SSM: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

KDA: Config = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
"""Kimi delta attention."""

RECURRENT: dict[str, Config] = {
    "mamba": dense(
        state_size=8,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
        tie_word_embeddings=True,
    ),
    "mamba2": dense(
        num_heads=4,
        head_dim=32,
        intermediate_size=128,
        state_size=16,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=2,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.0, 100.0],
        time_step_rank=4,
    ),
    "rwkv7": dense(
        num_hidden_layers=3,
        norm_eps=1e-5,
        head_dim=32,
        a_low_rank_dim=8,
        v_low_rank_dim=8,
        gate_low_rank_dim=8,
        decay_low_rank_dim=8,
    ),
}

HYBRID: dict[str, Config] = {
    "jamba": experts(
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=8,
        mamba_expand=2,
    ),
    "falcon_h1": dense(
        **GROUPED_SSM,
        mamba_rms_norm=True,
        lm_head_multiplier=1.0,
        embedding_multiplier=1.0,
        key_multiplier=1.0,
    ),
    "granitemoehybrid": experts(
        **GROUPED_SSM,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        embedding_multiplier=1.0,
        attention_multiplier=0.25,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        shared_intermediate_size=32,
        position_embedding_type="nope",
    ),
    "nemotron_h": experts(
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_proj_bias=False,
        ssm_state_size=16,
        conv_kernel=4,
        n_groups=2,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        hybrid_override_pattern=["M", "*", "-", "M", "E"],
        moe_shared_expert_intermediate_size=32,
    ),
    "lfm2": dense(
        num_hidden_layers=4,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=64,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        block_ff_dim=96,
        layer_types=["conv", FULL, "conv", FULL],
    ),
    "lfm2_moe": experts(
        num_hidden_layers=4,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        use_expert_bias=True,
        num_dense_layers=1,
        layer_types=["conv", FULL, "conv", FULL],
    ),
    "lfm2-vl": text(
        dense(
            model_type="lfm2",
            num_hidden_layers=3,
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            block_ff_dim=96,
            layer_types=["conv", FULL, "conv"],
        )
    ),
    "gear": dense(
        num_hidden_layers=4,
        layer_types=["conv_mixer", SLIDING, "conv_mixer", FULL],
        sliding_window=WINDOW,
        tie_word_embeddings=True,
    ),
    "qwen3_next": delta(num_hidden_layers=4, full_attention_interval=2, partial_rotary_factor=0.25),
    "qwen3_5": text(
        delta(
            model_type="qwen3_5_text",
            num_hidden_layers=4,
            full_attention_interval=2,
            num_experts=0,
            rope_parameters={
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    "qwen3_5_moe": text(
        delta(
            model_type="qwen3_5_moe_text",
            num_hidden_layers=4,
            full_attention_interval=2,
            rope_parameters={
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    "recurrent_gemma": dense(
        num_hidden_layers=4,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        num_key_value_heads=1,
        block_types=["recurrent", "attention"],
    ),
    "bailing_moe_linear": experts(
        num_hidden_layers=4,
        layer_group_size=2,
        group_norm_size=2,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
    ),
    "bailing_hybrid": latent(
        num_hidden_layers=4, layer_group_size=2, group_norm_size=2, partial_rotary_factor=0.5
    ),
    "bailing_moe_v3": latent(
        model_type="bailing_hybrid",
        architectures=["BailingMoeV3ForCausalLM"],
        num_hidden_layers=4,
        layer_group_size=2,
        head_dim=32,
        v_head_dim=32,
        moe_shared_expert_intermediate_size=32,
        short_conv_kernel_size=4,
    ),
    "olmo_hybrid": dense(
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=True,
        layer_types=[LINEAR, FULL] * 2,
    ),
    "kimi_linear": latent(
        num_hidden_layers=4,
        q_lora_rank=None,
        mla_use_nope=True,
        model_max_length=4096,
        linear_attn_config={**KDA, "kda_layers": [1, 3], "full_attn_layers": [2, 4]},
    ),
    "kimi_k3": text(
        latent(
            model_type="kimi_linear",
            num_hidden_layers=4,
            attn_res_block_size=2,
            linear_attn_config={**KDA, "kda_layers": [1, 3], "full_attn_layers": [2, 4]},
        )
    ),
    "plamo2": dense(
        num_hidden_layers=4,
        hidden_size_per_head=16,
        attention_window_size=4096,
        mamba_d_state=8,
        mamba_num_heads=4,
        mamba_step=2,
    ),
}
