"""Small configurations of attention families that slide, share, compress or select what they look at."""

from __future__ import annotations

from tests.mlx.configs import FULL, SLIDING, VOCABULARY, WINDOW, Config, dense, experts, latent, text

WINDOWED: dict[str, Config] = {
    "gemma3_text": dense(
        num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=3, query_pre_attn_scalar=16.0
    ),
    "gemma3": text(
        dense(
            model_type="gemma3_text",
            num_hidden_layers=4,
            sliding_window=WINDOW,
            sliding_window_pattern=2,
            query_pre_attn_scalar=16.0,
        )
    ),
    "gpt_oss": experts(
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "baichuan_m1": dense(
        sliding_window=WINDOW,
        sliding_window_layers=[1, 3],
        conv_window=2,
        num_hidden_layers=4,
        num_swa_attention_heads=4,
        num_swa_key_value_heads=2,
    ),
    "afm7": dense(hidden_dim=64, num_layers=3, num_kv_reuse_layers=1, num_heads=4, num_kv_heads=2),
    "afmoe": experts(layer_types=[SLIDING, FULL], sliding_window=WINDOW, num_dense_layers=1),
    "cohere2": dense(num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=1.0),
    "exaone4": dense(
        num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern="LG", rope_scaling=None
    ),
    "exaone_moe": experts(sliding_window=WINDOW, layer_types=[SLIDING, FULL], is_moe_layer=[False, True]),
    "gemma3n": text(
        dense(
            model_type="gemma3n_text",
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCABULARY,
            sliding_window=WINDOW,
            rope_local_base_freq=10000.0,
            final_logit_softcapping=30.0,
            layer_types=[SLIDING, FULL] * 3,
            activation_sparsity_pattern=[0.5, 0.0] * 3,
            hidden_size_per_layer_input=8,
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
            intermediate_size=[96] * 6,
        )
    ),
    "gemma4_text": dense(
        num_hidden_layers=6,
        global_head_dim=32,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL] * 3,
        tie_word_embeddings=True,
    ),
    "gemma4": text(
        dense(
            model_type="gemma4_text",
            num_hidden_layers=4,
            global_head_dim=32,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL] * 2,
            tie_word_embeddings=True,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        )
    ),
    "iquestloopcoder": dense(loop_num=2, loop_window_size=WINDOW),
    "laguna": experts(
        sliding_window=WINDOW, layer_types=[SLIDING, FULL], num_attention_heads_per_layer=[4, 2]
    ),
    "llama4": text(
        dense(
            model_type="llama4_text",
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=96,
            num_hidden_layers=4,
            num_experts_per_tok=1,
            num_local_experts=4,
            rope_scaling=None,
            use_qk_norm=True,
        )
    ),
    "llama4_text": dense(intermediate_size_mlp=96, no_rope_layers=[1, 0], use_qk_norm=True),
    "mellum": experts(
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
        rope_parameters={
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
            FULL: {"rope_theta": 50000.0, "rope_type": "default"},
        },
    ),
    "mimo_v2_flash": experts(
        hybrid_layer_pattern=[0, 1, 1],
        num_hidden_layers=3,
        moe_layer_freq=[0, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        layernorm_epsilon=1e-5,
        swa_rope_theta=10000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        v_head_dim=12,
        swa_head_dim=16,
        swa_v_head_dim=12,
        partial_rotary_factor=0.5,
    ),
    "ministral3": dense(
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral3": text(
        dense(
            model_type="ministral3",
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL],
            rope_parameters={
                "rope_theta": 10000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    "muse_glimmer": dense(num_hidden_layers=4, sliding_window=WINDOW, output_multiplier=1.0),
    "muse_spark": text(
        experts(
            model_type="muse_spark_text",
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            layer_rope_theta=[10000.0, 0.0],
            layer_types=[SLIDING, FULL],
            sliding_window=WINDOW,
            post_norm_eps=1e-6,
            final_logit_softcapping=20.0,
            output_multiplier=1.0,
            moe_hidden_size=32,
            num_shared_experts=0,
        )
    ),
    "olmo3": dense(sliding_window=WINDOW, layer_types=[SLIDING, FULL]),
    "phi3small": dense(
        num_hidden_layers=4,
        vocab_size=100352,  # the model silences tokens of these ids whatever its vocabulary
        dense_attention_every_n_layers=2,
        ff_intermediate_size=96,
        gegelu_limit=20.0,
        layer_norm_epsilon=1e-5,
        mup_width_multiplier=1.0,
        mup_embedding_multiplier=1.0,
        blocksparse_block_size=32,
        blocksparse_num_local_blocks=1,
        blocksparse_vert_stride=2,
    ),
    "plamo3": dense(num_hidden_layers=4, window_size=WINDOW, sliding_window_pattern=2),
    "spark2_5": dense(
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
        rope_parameters={
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
            FULL: {"rope_theta": 50000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "step3p5": experts(
        num_attention_groups=2,
        sliding_window=WINDOW,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        attention_other_setting={
            "attention_type": SLIDING,
            "num_attention_heads": 4,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
        moe_layers_enum="2,3",
    ),
}

MLA: dict[str, Config] = {
    "deepseek_v3": latent(),
    "deepseek_v2": latent(
        topk_method="gready",
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "deepseek_v32": latent(index_head_dim=16, index_n_heads=2, index_topk=12),
    "glm4_moe_lite": latent(num_nextn_predict_layers=0),
    "glm_moe_dsa": latent(
        index_head_dim=16,
        index_n_heads=2,
        index_topk=12,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "kimi_k25": text(latent(model_type="deepseek_v3")),
    "kimi_vl": text(latent(model_type="deepseek_v3")),
    "longcat_flash": latent(
        attention_method="MLA",
        zero_expert_type="identity",
        ffn_hidden_size=96,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        zero_expert_num=2,
        num_layers=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "longcat_flash_ngram": latent(
        ffn_hidden_size=96,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        zero_expert_num=2,
        num_layers=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        ngram_vocab_size_ratio=3,
        emb_neighbor_num=3,
        emb_split_num=2,
    ),
    "minicpm3": latent(
        rope_scaling={
            "type": "longrope",
            "original_max_position_embeddings": 2048,
            "long_factor": [1.5] * 4,
            "short_factor": [1.0] * 4,
        },
        dim_model_base=64,
        scale_depth=1.4,
        scale_emb=1.0,
    ),
    "mistral4": latent(
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        }
    ),
    "youtu_llm": latent(),
    "deepseek_v41": dense(
        num_hidden_layers=6,
        head_dim=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-6,
        sliding_window=WINDOW,
        compress_ratios=[0, 0, 4, 4, 4, 4],
        kv_source_layer_ids=[2],
        index_source_layer_ids=[2, 4],
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    ),
}
