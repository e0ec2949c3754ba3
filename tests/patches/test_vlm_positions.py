"""mlx-vlm's models that scale or turn by position: each row by its own, whoever is first or longest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models import rope_utils
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.mistral3.config import TextConfig
from mlx_vlm.models.mistral3.language import LanguageModel

from chairlift.cache.batch import RowBatch
from chairlift.patches import MLX, MLX_LM, MLX_VLM, apply_patches, undo_patches
from chairlift.patches.registry import PATCHES

PATCH = next(patch for patch in PATCHES if patch.name == "positions per row of mlx-vlm")
TRAINED = 16
LENGTHS = {0: 3, 1: 40, 2: 90}

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "llama_4_scaling_beta": 1.0,
        "original_max_position_embeddings": TRAINED,
    },
}
MINISTRAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FAMILIES = {"ministral3": MINISTRAL, "mistral4": LATENT}


@pytest.fixture(autouse=True)
def applied() -> Iterator[None]:
    apply_patches((MLX, MLX_LM, MLX_VLM))
    yield
    undo_patches()
    apply_patches()


def build(name: str) -> Any:
    model = LanguageModel(TextConfig(model_type=name, **{**CONFIG, **FAMILIES[name]}))
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(0), len(parameters))
    weights = [
        (path, mx.random.normal(value.shape, key=key) * (2 / value.shape[-1] ** 0.5 if value.ndim > 1 else 1))
        for (path, value), key in zip(parameters, keys, strict=True)
    ]
    model.update(tree_unflatten(weights))
    return model


def prompt(row: int) -> mx.array:
    return mx.random.randint(0, 64, (1, LENGTHS[row] + 1), key=mx.random.key(row))


def worst(name: str) -> float:
    """Largest difference of a decode step's logits from those of solo runs."""
    model = build(name)
    batch = RowBatch(make_prompt_cache(model))
    solo = {}
    for row, length in LENGTHS.items():
        caches, own = make_prompt_cache(model), make_prompt_cache(model)
        model(prompt(row)[:, :length], cache=caches)
        model(prompt(row)[:, :length], cache=own)
        batch.change(join={row: (caches, length)})
        solo[row] = model(prompt(row)[:, length:], cache=own).logits[0, -1]
    step = batch.begin()
    tokens = mx.concatenate([prompt(row)[:, LENGTHS[row] :] for row in batch.order])
    caches = batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
    logits = model(tokens, cache=caches).logits[:, -1]
    want = mx.stack([solo[row] for row in batch.order])
    return float(mx.abs(logits - want).max().item())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_queries_are_scaled_by_the_rows_own_position(name: str) -> None:
    assert worst(name) < 1e-4
    PATCH.undo()
    assert worst(name) > 1e-2


@pytest.mark.parametrize("offsets", [(0, 3, 4), (3, 15, 40), (16, 90, 91)])
def test_longrope_turns_each_row_by_its_own_length(offsets: tuple[int, ...]) -> None:
    rope = rope_utils.SuScaledRoPE(
        8, 10000.0, 64, TRAINED, [1.0, 1.1, 1.2, 1.3], [2.0, 2.5, 3.0, 4.0], 1.0, 1.3
    )
    x = mx.random.normal((3, 2, 1, 12), key=mx.random.key(0))
    rows = mx.array(offsets, dtype=mx.int32)
    alone = mx.concatenate([rope(x[row : row + 1], offset) for row, offset in enumerate(offsets)])
    assert mx.allclose(rope(x, rows), alone, atol=1e-6)
    mixed = min(offsets) < TRAINED <= max(offsets)
    PATCH.undo()
    assert mx.allclose(rope(x, rows), alone, atol=1e-6).item() is not mixed


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_reads_nothing_from_the_device(name: str) -> None:
    model = build(name)
    tokens = mx.array([[1], [2]])

    def step(offset: mx.array) -> mx.array:
        batch = RowBatch(make_prompt_cache(model))
        batch.change(join={row: (make_prompt_cache(model), 0) for row in (0, 1)})
        logits: mx.array = model(tokens, cache=batch.caches(batch.begin(), offset)).logits
        return logits

    offset = mx.array([0, 0], dtype=mx.int32)
    assert mx.allclose(mx.compile(step)(offset), step(offset), atol=1e-5)
    PATCH.undo()
    with pytest.raises(ValueError, match="eval"):
        mx.compile(step)(offset)
