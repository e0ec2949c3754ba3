"""Small random vision models of mlx-vlm's families in float32, with the images they take.

An image here is what the family's processor gives of one: the prompt's tokens for it, and arrays.
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from chairlift.engine.media import PreparedMedia
from tests.mlx.configs import Config
from tests.mlx.families import EMBEDDING, FAINT, FAINT_EMBEDDING, _weight

VOCABULARY = 192
TEXT_TOKENS = 180
"""Prompts draw their text below this; what stands for images lies above."""
IMAGE, VIDEO, START, END = 185, 186, 187, 188

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Image:
    """One image as the processor of a family gives it."""

    tokens: tuple[int, ...]
    arrays: Arrays
    digest: str

    @property
    def count(self) -> int:
        return self.tokens.count(IMAGE)


Draw = Callable[[np.random.Generator, int, int], tuple[int, Arrays]]
"""(random numbers, height, width in units of the family's smallest image) -> image tokens, arrays."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of vision models, the small configuration that stands for it, and its images."""

    name: str
    config: Config
    draw: Draw
    wrap: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Tokens before and behind an image's."""
    axis: int = 0
    """Of a processor's arrays: that of the images."""

    def image(self, height: int = 1, width: int = 1, seed: int = 0) -> Image:
        """An image of random pixels."""
        count, arrays = self.draw(np.random.default_rng(seed), height, width)
        before, behind = self.wrap
        tokens = (*before, *[IMAGE] * count, *behind)
        return Image(tokens, arrays, f"{self.name}/{height}x{width}/{seed}")

    def media(self, images: Sequence[Image]) -> PreparedMedia:
        """What the engine is given for a prompt with these images."""
        arrays = {
            name: _joined([image.arrays[name] for image in images], self.axis) for name in images[0].arrays
        }
        return PreparedMedia(arrays, tuple(i.digest for i in images), tuple(i.count for i in images))


def _joined(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """One behind the other; smaller images are padded, as processors do it."""
    most = np.max([array.shape for array in arrays], axis=0)
    widths = [
        [(0, 0 if at == axis else int(m - n)) for at, (n, m) in enumerate(zip(a.shape, most, strict=True))]
        for a in arrays
    ]
    return np.concatenate([np.pad(a, w) for a, w in zip(arrays, widths, strict=True)], axis=axis)


def build(family: VisionFamily, seed: int = 0) -> Any:
    """A model of the family with seeded weights, as `tests.mlx.families.build` makes them."""
    module = importlib.import_module(f"mlx_vlm.models.{family.name}")
    config = copy.deepcopy({"model_type": family.name, **family.config})
    model_config = module.ModelConfig.from_dict(config)
    from mlx_vlm.utils import update_module_configs

    model_config = update_module_configs(model_config, module, config, ["text", "vision"])
    mx.random.seed(seed)
    model = module.Model(model_config)
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    embedding = FAINT_EMBEDDING if family.name in FAINT else EMBEDDING
    weights = [(n, _weight(n, v, k, embedding)) for (n, v), k in zip(parameters, keys, strict=True)]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def text_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(f"vision/{length}/{seed}")
    return tuple(draw.randrange(1, TEXT_TOKENS) for _ in range(length))


def seeing_prompt(
    family: VisionFamily, before: int, images: Sequence[Image], after: int, seed: int = 0
) -> tuple[tuple[int, ...], PreparedMedia]:
    """Text, images each followed by a token, text."""
    tokens = list(text_prompt(before, seed))
    for place, image in enumerate(images):
        tokens += [*image.tokens, 5 + place]
    tokens += text_prompt(after, seed + 1)
    return tuple(tokens), family.media(images)


# What processors give


def patches(dim: int, merge: int = 4) -> Draw:
    """Qwen: rows of patches, two patches to a unit and side; a grid `(1, height, width)` an image."""

    def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[int, Arrays]:
        high, wide = 2 * height, 2 * width
        pixels = numbers.standard_normal((high * wide, dim), dtype=np.float32)
        return high * wide // merge, {"pixel_values": pixels, "image_grid_thw": np.array([[1, high, wide]])}

    return draw


def square(side: int, tokens: int) -> Draw:
    """Families with images of one size: `[1, 3, side, side]`."""

    def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[int, Arrays]:
        return tokens, {"pixel_values": numbers.standard_normal((1, 3, side, side), dtype=np.float32)}

    return draw


def tiles(side: int, tokens: int, *, batched: bool = False) -> Draw:
    """Families that cut images into tiles: `[tiles, 3, side, side]`, or with a batch axis before it."""

    def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[int, Arrays]:
        count = height * width
        pixels = numbers.standard_normal((count, 3, side, side), dtype=np.float32)
        return tokens * count, {"pixel_values": pixels[None] if batched else pixels}

    return draw


def sized(patch: int, merge: int = 1) -> Draw:
    """Pixtral: `[1, 3, height, width]` and its size; a token for each patch (or block of them)."""

    def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[int, Arrays]:
        high, wide = 2 * height * patch, 2 * width * patch
        pixels = numbers.standard_normal((1, 3, high, wide), dtype=np.float32)
        tokens = 4 * height * width // merge**2
        return tokens, {"pixel_values": pixels, "image_sizes": np.array([[high, wide]])}

    return draw


def packed(patch: int, room: int) -> Draw:
    """LFM2: patches `[1, room, dim]`, those behind the image's own masked; four patches a token."""

    def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[int, Arrays]:
        count = 4 * height * width
        pixels = numbers.standard_normal((1, room, 3 * patch * patch), dtype=np.float32)
        mask = (np.arange(room) < count)[None].astype(np.int32)
        shapes = np.array([[2 * height, 2 * width]])
        arrays = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
        return count // 4, arrays

    return draw


def moon(patch: int) -> Draw:
    """Kimi: patches `[n, 3, patch, patch]` and a grid `(height, width)`; four patches a token."""

    def draw(numbers: np.random.Generator, height: int, width: int) -> tuple[int, Arrays]:
        high, wide = 2 * height, 2 * width
        pixels = numbers.standard_normal((high * wide, 3, patch, patch), dtype=np.float32)
        return high * wide // 4, {"pixel_values": pixels, "image_grid_hws": np.array([[high, wide]])}

    return draw


# Configurations

TEXT: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
VISION: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "depth": 2,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
}
IDS: Config = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "media_placeholder_token_id": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "pad_token_id": 0,
}
QWEN_VISION: Config = {
    **VISION,
    "embed_dim": 32,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [],
}
DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}
QWEN_PATCHES = patches(3 * 2 * 4 * 4)
MARKS = ((START,), (END,))


def with_parts(text: Mapping[str, Any], vision: Mapping[str, Any], **fields: Any) -> Config:
    return {**IDS, "text_config": {**TEXT, **text}, "vision_config": {**vision}, **fields}


def flat_text(text: Mapping[str, Any], vision: Mapping[str, Any]) -> Config:
    """Qwen2-VL and its next: the language model's fields stand at the root."""
    return {**IDS, **TEXT, **text, "vision_config": {**vision}}


GLM_VISION: Config = {
    **VISION,
    "model_type": "glm4v",
    "in_channels": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
    "window_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

FAMILIES: dict[str, VisionFamily] = {
    family.name: family
    for family in (
        VisionFamily(
            "qwen3_vl_moe",
            with_parts(
                {
                    **EXPERTS,
                    "model_type": "qwen3_vl_moe_text",
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [0],
                    "num_hidden_layers": 3,
                    "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
                },
                {**QWEN_VISION, "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [0, 1]},
            ),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "glm4v",
            with_parts(
                {
                    "model_type": "glm4v_text",
                    "eos_token_id": [191],
                    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
                },
                GLM_VISION,
            ),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "llava_next",
            with_parts({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
            lambda numbers, height, width: (1, {"pixel_values": numbers.standard_normal((1, 1, 3, 32, 32))}),
        ),
        VisionFamily(
            "internvl",
            with_parts({"model_type": "qwen2"}, {**VISION, "model_type": "internvl_vision"}),
            tiles(32, 4),
            MARKS,
        ),
        VisionFamily(
            "gemma4",
            with_parts(
                {
                    "model_type": "gemma4_text",
                    "global_head_dim": 16,
                    "num_kv_shared_layers": 0,
                    "num_hidden_layers": 4,
                    "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": VOCABULARY,
                    "sliding_window": 16,
                    "sliding_window_pattern": 2,
                    "use_bidirectional_attention": "vision",
                    "use_double_wide_mlp": False,
                },
                {
                    **VISION,
                    "model_type": "gemma4_vision",
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "global_head_dim": 16,
                    "default_output_length": 4,
                    "pooling_kernel_size": 2,
                    "position_embedding_size": 64,
                },
                audio_token_id=189,
            ),
            square(32, 4),
            MARKS,
        ),
        VisionFamily(
            "qwen2_vl",
            flat_text(
                {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
                {**QWEN_VISION, "model_type": "qwen2_vl", "hidden_size": 64, "mlp_ratio": 2},
            ),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "qwen2_5_vl",
            flat_text(
                {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
                {**QWEN_VISION, "model_type": "qwen2_5_vl"},
            ),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "qwen3_vl",
            with_parts(
                {
                    "model_type": "qwen3_vl_text",
                    "num_hidden_layers": 3,
                    "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
                },
                {**QWEN_VISION, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1]},
            ),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "qwen3_5",
            with_parts({**DELTA, "model_type": "qwen3_5_text"}, {**QWEN_VISION, "model_type": "qwen3_5"}),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "qwen3_5_moe",
            with_parts(
                {**DELTA, **EXPERTS, "model_type": "qwen3_5_moe_text"},
                {**QWEN_VISION, "model_type": "qwen3_5_moe"},
            ),
            QWEN_PATCHES,
            MARKS,
        ),
        VisionFamily(
            "gemma3",
            with_parts(
                {
                    "model_type": "gemma3_text",
                    "mm_tokens_per_image": 4,
                    "sliding_window": 16,
                    "sliding_window_pattern": 2,
                    "query_pre_attn_scalar": 16,
                },
                {**VISION, "model_type": "siglip_vision_model"},
            ),
            square(32, 4),
            MARKS,
        ),
        VisionFamily(
            "llava",
            with_parts({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
            square(32, 16),
        ),
        VisionFamily(
            "pixtral",
            with_parts(
                {"model_type": "mistral"},
                {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
            ),
            sized(8),
        ),
        VisionFamily(
            "mistral3",
            with_parts(
                {"model_type": "mistral"},
                {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
                spatial_merge_size=2,
            ),
            sized(8, merge=2),
        ),
        VisionFamily(
            "smolvlm",
            with_parts({"model_type": "llama"}, {**VISION, "model_type": "siglip_vision_model"}),
            tiles(32, 4, batched=True),
            axis=1,
        ),
        VisionFamily(
            "idefics3",
            with_parts({"model_type": "llama"}, {**VISION, "model_type": "siglip_vision_model"}),
            tiles(32, 4, batched=True),
            axis=1,
        ),
        VisionFamily(
            "internvl_chat",
            with_parts({"model_type": "qwen2"}, {**VISION, "model_type": "intern_vit_6b"}),
            tiles(32, 4),
            MARKS,
        ),
        VisionFamily(
            "paligemma",
            with_parts(
                {"model_type": "gemma"}, {**VISION, "model_type": "siglip_vision_model", "projection_dim": 64}
            ),
            square(32, 16),
        ),
        VisionFamily(
            "lfm2_vl",
            with_parts(
                {
                    "model_type": "lfm2",
                    "norm_eps": 1e-5,
                    "conv_bias": False,
                    "conv_L_cache": 3,
                    "block_dim": 64,
                    "block_ff_dim": 96,
                    "block_multiple_of": 16,
                    "block_auto_adjust_ff_dim": False,
                    "num_hidden_layers": 3,
                    "layer_types": ["conv", "full_attention", "conv"],
                    "conv_dim": 64,
                    "conv_dim_out": 64,
                    "num_heads": 4,
                },
                {**VISION, "model_type": "lfm2_vl", "patch_size": 4, "num_patches": 64},
                projector_hidden_size=48,
            ),
            packed(4, 64),
            MARKS,
        ),
        VisionFamily(
            "kimi_vl",
            with_parts(
                {
                    "model_type": "deepseek_v3",
                    "num_key_value_heads": 4,
                    "q_lora_rank": 24,
                    "kv_lora_rank": 16,
                    "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16,
                    "v_head_dim": 16,
                    "n_routed_experts": 4,
                    "n_shared_experts": 1,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32,
                    "n_group": 1,
                    "topk_group": 1,
                    "first_k_dense_replace": 1,
                },
                {**VISION, "model_type": "moonvit", "patch_size": 4, "embed_dim": 32},
            ),
            moon(4),
            MARKS,
        ),
        VisionFamily(
            "aya_vision",
            with_parts(
                {"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2},
                {**VISION, "model_type": "siglip_vision_model"},
                alignment_intermediate_size=48,
            ),
            tiles(32, 4),
            MARKS,
        ),
    )
}
