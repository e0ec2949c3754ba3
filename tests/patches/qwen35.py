"""Small Qwen3.5 models of mlx-vlm, and rows of text and images to serve with them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from chairlift.patches.qwen3_5 import (
    patch_qwen35_attention_for_batching,
    undo_qwen35_attention_for_batching,
)

IMAGE, VISION_START, VISION_END = 120, 122, 123
TOKENS = 100
"""Text tokens are below this."""

TEXT = {
    "hidden_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}


def make_model(kind: str) -> Any:
    """A small random mlx-vlm model of `kind` (qwen3_5, qwen3_5_moe), float32, vision tower and all."""
    module = importlib.import_module(f"mlx_vlm.models.{kind}")
    text = {**TEXT, "model_type": f"{kind}_text"}
    text |= EXPERTS if kind == "qwen3_5_moe" else {"intermediate_size": 96}
    config = module.ModelConfig.from_dict(
        {
            "model_type": kind,
            "text_config": text,
            "vision_config": {**VISION, "model_type": kind},
            "image_token_id": IMAGE,
            "video_token_id": 121,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "vocab_size": 128,
        }
    )
    model = module.Model(config)
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(1), len(parameters))
    model.update(tree_unflatten([(n, weight(n, v, k)) for (n, v), k in zip(parameters, keys, strict=True)]))
    model.eval()
    mx.eval(model.parameters())
    return model


def weight(name: str, value: mx.array, key: mx.array) -> mx.array:
    """Weights under which prompts move the answer and states outlive them."""
    noise = mx.random.normal(value.shape, key=key)
    if name.endswith(("A_log", "dt_bias")):
        return noise * 0.5 - (1 if name.endswith("A_log") else 3)
    if "embed_tokens" in name:
        return noise * 0.3
    if value.ndim < 2:
        return value.astype(mx.float32) + noise * 0.1
    return noise * 2 / (value.size // value.shape[0]) ** 0.5


@contextmanager
def upstream() -> Iterator[None]:
    """Without the patch, for reference."""
    undo_qwen35_attention_for_batching()
    yield
    patch_qwen35_attention_for_batching()


@dataclass
class Row:
    """A request: tokens, perhaps the patches and grids of its images, and its logits by step."""

    tokens: list[int]
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    pixels: mx.array | None = None
    logits: list[mx.array] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def take(self, logits: mx.array) -> None:
        self.logits.append(logits)
        self.answer.append(int(mx.argmax(logits).item()))


def text_row(length: int, seed: int) -> Row:
    draw = random.Random(seed)
    return Row([draw.randrange(TOKENS) for _ in range(length)])


def image_row(before: int, after: int, *sides: tuple[int, int], seed: int = 0) -> Row:
    """Text, images of (height, width) patches, text."""
    draw = random.Random(seed)
    tokens = [draw.randrange(TOKENS) for _ in range(before)]
    for high, wide in sides:
        tokens += [VISION_START, *[IMAGE] * (high * wide // 4), VISION_END]
    tokens += [draw.randrange(TOKENS) for _ in range(after)]
    patches = sum(high * wide for high, wide in sides)
    pixels = mx.random.normal((patches, 3 * 2 * 4 * 4), key=mx.random.key(seed))
    return Row(tokens, [(1, *side) for side in sides], pixels)


def embed(model: Any, row: Row) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Tokens `[1, n]`, embeddings, positions `[3, 1, n]` and delta `[1, 1]` of a prompt."""
    tokens = mx.array([row.tokens])
    grids = {"image_grid_thw": mx.array(row.grids)} if row.grids else {}
    features = model.get_input_embeddings(tokens, row.pixels, **grids)
    ids = features.position_ids
    ids = mx.broadcast_to(ids if ids.ndim == 3 else ids[None], (3, 1, len(row.tokens)))
    return tokens, features.inputs_embeds, ids, features.rope_deltas.reshape(1, 1)


def delta(model: Any, row: Row) -> int:
    return int(embed(model, row)[3].item())


def alone(model: Any, row: Row, steps: int) -> Row:
    """The row's solo run by upstream, every position told."""
    with upstream():
        solo = Row(row.tokens, row.grids, row.pixels)
        tokens, embeds, ids, shift = embed(model, row)
        caches = model.language_model.make_cache()
        output = model.language_model(tokens, inputs_embeds=embeds, cache=caches, position_ids=ids)
        solo.take(output.logits[0, -1])
        for step in range(steps):
            at = mx.full((3, 1, 1), len(row.tokens) + step) + shift
            output = model.language_model(mx.array([solo.answer[-1:]]), cache=caches, position_ids=at)
            solo.take(output.logits[0, -1])
        return solo


def prefill(model: Any, row: Row) -> list[Any]:
    """A prompt in two chunks, as a server would: the caches, and the row's first token."""
    tokens, embeds, ids, shift = embed(model, row)
    caches = model.language_model.make_cache()
    half = tokens.shape[1] // 2
    for part in (slice(0, half), slice(half, None)) if half else (slice(0, None),):
        output = model.language_model(
            tokens[:, part], inputs_embeds=embeds[:, part], cache=caches, position_ids=ids, rope_deltas=shift
        )
    row.take(output.logits[0, -1])
    return caches


def merged(rows: list[list[Any]]) -> list[Any]:
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


def joined(batch: list[Any] | None, row: list[Any]) -> list[Any]:
    """The batch with one more row."""
    new = merged([row])
    if batch is None:
        return new
    for layer, more in zip(batch, new, strict=True):
        layer.extend(more)
    return batch


def check(model: Any, rows: list[Row]) -> None:
    for row in rows:
        solo = alone(model, row, len(row.answer) - 1)
        assert row.answer == solo.answer
        for got, expected in zip(row.logits, solo.logits, strict=True):
            assert mx.abs(got - expected).max().item() < 1e-4


Tell = Callable[[list[Row]], dict[str, Any]]
"""What a step is told, besides tokens and caches."""


def serve(model: Any, rows: list[Row], tell: Tell, answer: int = 4, every: int = 2) -> None:
    """Rows join one by one, `every` steps apart, and leave when they have `answer` tokens."""
    waiting, live, batch, step = list(rows), [], None, 0
    while waiting or live:
        if waiting and step % every == 0:
            row = waiting.pop(0)
            batch = joined(batch, prefill(model, row))
            live.append(row)
        step += 1
        output = model.language_model(mx.array([row.answer[-1:] for row in live]), cache=batch, **tell(live))
        for place, row in enumerate(live):
            row.take(output.logits[place, -1])
        stay = [place for place, row in enumerate(live) if len(row.answer) < answer]
        live = [live[place] for place in stay]
        if not live:
            batch = None
        elif len(stay) < len(output.logits):
            for layer in batch or []:
                layer.filter(mx.array(stay))


def nothing(live: list[Row]) -> dict[str, Any]:
    return {}


def lengths(live: list[Row]) -> list[int]:
    """Tokens of each row that are in the caches before the step."""
    return [len(row.tokens) + len(row.answer) - 1 for row in live]


def mixed_rows() -> list[Row]:
    return [
        text_row(1, seed=1),
        image_row(3, 5, (4, 8), seed=2),
        text_row(200, seed=3),
        image_row(11, 2, (8, 8), seed=4),
        text_row(17, seed=5),
        image_row(0, 30, (4, 4), (4, 8), seed=6),
        text_row(64, seed=7),
    ]
