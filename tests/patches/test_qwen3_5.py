"""The contract's part 2: Qwen3.5 rows of any lengths and images, in one batch."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as lm_caches
import mlx_vlm.models.cache as vlm_caches
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from chairlift.cache.mamba import BatchMambaCache
from chairlift.patches.qwen3_5 import (
    LANGUAGE,
    patch_qwen35_attention_for_batching,
    undo_qwen35_attention_for_batching,
)
from tests.mlx.families import FAMILIES, build

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


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="module")
def dense() -> Any:
    return make_model("qwen3_5")


@pytest.fixture
def patched() -> Iterator[None]:
    assert patch_qwen35_attention_for_batching() is True
    yield
    undo_qwen35_attention_for_batching()


@contextmanager
def upstream() -> Iterator[None]:
    """Without the patch, for reference."""
    undo_qwen35_attention_for_batching()
    yield
    patch_qwen35_attention_for_batching()


# Rows


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


# The call


def test_it_applies_once_and_is_undone() -> None:
    language: Any = importlib.import_module(LANGUAGE)
    original = language.LanguageModel.__call__, language.Qwen3_5Attention._prepare_projected_qkv
    assert patch_qwen35_attention_for_batching() is True
    once = language.LanguageModel.__call__, language.Qwen3_5Attention._prepare_projected_qkv
    assert patch_qwen35_attention_for_batching() is True
    assert once == (language.LanguageModel.__call__, language.Qwen3_5Attention._prepare_projected_qkv)
    assert once[0] is not original[0] and once[1] is not original[1]
    undo_qwen35_attention_for_batching()
    assert original == (language.LanguageModel.__call__, language.Qwen3_5Attention._prepare_projected_qkv)


@pytest.mark.parametrize("absent", ["mlx_vlm", LANGUAGE])
def test_without_mlx_vlm_it_does_nothing(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    for name in list(sys.modules):
        if name.startswith("mlx_vlm") and absent == "mlx_vlm":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    assert patch_qwen35_attention_for_batching() is False


def test_another_mlx_vlm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    language: Any = importlib.import_module(LANGUAGE)
    monkeypatch.delattr(language.Qwen3_5Attention, "_prepare_projected_qkv")
    with pytest.raises(RuntimeError, match="Qwen3_5Attention._prepare_projected_qkv"):
        patch_qwen35_attention_for_batching()
    monkeypatch.undo()
    undo_qwen35_attention_for_batching()


# The proof


def test_rows_and_images_mixed_equal_their_solo_runs(patched: None, model: Any) -> None:
    """Told nothing: offsets are the caches', deltas travel with the rows."""
    rows = mixed_rows()
    assert sorted({delta(model, row) for row in rows}) == [-12, -6, -4, 0]
    serve(model, rows, nothing)
    check(model, rows)


@pytest.mark.parametrize("seed", range(3))
def test_text_rows_of_random_lengths(patched: None, dense: Any, seed: int) -> None:
    draw = random.Random(seed)
    rows = [text_row(draw.randint(1, 200), seed=10 * seed + k) for k in range(5)]
    serve(dense, rows, nothing, every=draw.randint(1, 3))
    check(dense, rows)


def test_deltas_told(patched: None, dense: Any) -> None:
    rows = mixed_rows()

    def tell(live: list[Row]) -> dict[str, Any]:
        return {"rope_deltas": mx.array([[delta(dense, row)] for row in live])}

    serve(dense, rows, tell)
    check(dense, rows)


def test_positions_told(patched: None, dense: Any) -> None:
    """Offset + delta, `(3, rows, 1)`, deltas 0, -4 and -12 beside each other."""
    rows = mixed_rows()[:4]

    def tell(live: list[Row]) -> dict[str, Any]:
        at = [n + delta(dense, row) for n, row in zip(lengths(live), live, strict=True)]
        return {"position_ids": mx.broadcast_to(mx.array(at)[None, :, None], (3, len(live), 1))}

    serve(dense, rows, tell, answer=8)
    check(dense, rows)


def test_stale_positions_are_not_used(patched: None, dense: Any) -> None:
    """Ids of a prompt, or of another batch, in place of the step's."""
    rows = mixed_rows()

    def tell(live: list[Row]) -> dict[str, Any]:
        return {"position_ids": mx.zeros((3, len(live) + len(live) % 2, 9), dtype=mx.int32)}

    serve(dense, rows, tell)
    check(dense, rows)


def test_ids_of_the_whole_prompt_told_for_ever(patched: None, dense: Any) -> None:
    """As mlx-vlm's own generation tells them: right for the prompt's chunks, stale afterwards."""
    row = image_row(3, 5, (8, 8), seed=2)
    ids = embed(dense, row)[2]
    caches = prefill(dense, row)
    for _ in range(3):
        output = dense.language_model(mx.array([row.answer[-1:]]), cache=caches, position_ids=ids)
        row.take(output.logits[0, -1])
    check(dense, [row])


def test_nothing_is_kept_on_the_model(patched: None, dense: Any) -> None:
    language_model = dense.language_model
    language_model._rope_deltas, language_model._position_ids = mx.array([[-77]]), mx.zeros((3, 1, 500))
    kept = language_model._rope_deltas, language_model._position_ids
    rows = mixed_rows()
    try:
        serve(dense, rows, nothing)
        assert language_model._rope_deltas is kept[0] and language_model._position_ids is kept[1]
        check(dense, rows)
    finally:
        language_model._rope_deltas = language_model._position_ids = None


def test_upstream_takes_the_last_request_s_delta_for_all(dense: Any) -> None:
    """The fault, without the patch: no error, wrong answers."""
    undo_qwen35_attention_for_batching()
    rows = [image_row(11, 2, (8, 8), seed=4), text_row(17, seed=5)]
    serve(dense, rows, nothing)
    with pytest.raises(AssertionError):
        check(dense, rows)
    undo_qwen35_attention_for_batching()
    dense.language_model._rope_deltas = dense.language_model._position_ids = None


def test_an_image_prompt_by_its_grids(patched: None, dense: Any) -> None:
    """The model itself asks for the index of a prompt whose grids it is given, and keeps the delta."""
    row = image_row(3, 5, (8, 8), seed=9)
    tokens, embeds, _, _ = embed(dense, row)
    caches = dense.language_model.make_cache()
    output = dense.language_model(
        tokens,
        inputs_embeds=embeds,
        cache=caches,
        image_grid_thw=mx.array(row.grids),
        pixel_values=row.pixels,
    )
    row.take(output.logits[0, -1])
    for _ in range(3):
        row.take(dense.language_model(mx.array([row.answer[-1:]]), cache=caches).logits[0, -1])
    check(dense, [row])


def test_extracted_rows_keep_their_delta(patched: None, dense: Any) -> None:
    rows = [text_row(30, seed=1), image_row(3, 5, (8, 8), seed=2)]
    batch = merged([prefill(dense, row) for row in rows])
    single = [layer.extract(1) for layer in batch]
    for _ in range(2):
        rows[1].take(dense.language_model(mx.array([rows[1].answer[-1:]]), cache=single).logits[0, -1])
    check(dense, rows)


def test_left_padded_prompts_in_one_batch(patched: None, dense: Any) -> None:
    rows = [text_row(n, seed=n) for n in (3, 12, 7)]
    padding = [12 - len(row.tokens) for row in rows]
    tokens = mx.array([[0] * pad + row.tokens for pad, row in zip(padding, rows, strict=True)])
    batch = [
        vlm_caches.ArraysCache(2, left_padding=padding)
        if layer.is_linear
        else vlm_caches.BatchKVCache(padding)
        for layer in dense.language_model.layers
    ]
    output = dense.language_model(tokens, cache=batch)
    for step in range(4):
        for place, row in enumerate(rows):
            row.take(output.logits[place, -1])
        if step < 3:
            output = dense.language_model(mx.array([row.answer[-1:] for row in rows]), cache=batch)
    check(dense, rows)


def test_a_prompt_with_an_attention_mask(patched: None, dense: Any) -> None:
    """Left padding that only the mask knows of, on plain caches."""
    row = text_row(9, seed=3)
    caches = dense.language_model.make_cache()
    output = dense.language_model(mx.array([row.tokens]), cache=caches, mask=mx.ones((1, 9), dtype=mx.int32))
    row.take(output.logits[0, -1])
    row.take(dense.language_model(mx.array([row.answer[-1:]]), cache=caches).logits[0, -1])
    check(dense, [row])


def test_our_recurrent_cache_in_the_model(patched: None, dense: Any) -> None:
    rows = mixed_rows()[:4]
    caches = merged([prefill(dense, row) for row in rows])
    batch = []
    for layer in caches:
        if isinstance(layer, vlm_caches.ArraysCache):
            ours = BatchMambaCache(size=2)
            ours.cache = layer.cache
            layer = ours
        batch.append(layer)
    deltas = mx.array([[delta(dense, row)] for row in rows])
    for _ in range(3):
        tokens = mx.array([row.answer[-1:] for row in rows])
        output = dense.language_model(tokens, cache=batch, rope_deltas=deltas)
        for place, row in enumerate(rows):
            row.take(output.logits[place, -1])
    check(dense, rows)


# The step


@contextmanager
def reads_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the calls by which Python reads a value of the device."""
    reads: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            reads.append(name)
            return original(self, *args)

        return call

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__array__"):
            if hasattr(mx.array, name):
                patch.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
        for name in ("eval", "async_eval"):
            original = getattr(mx, name)
            patch.setattr(mx, name, lambda *args, n=name, f=original: (reads.append(n), f(*args))[1])
        yield reads


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_reads_nothing_of_the_device(
    patched: None, dense: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rows = mixed_rows()[:count]
    batch = merged([prefill(dense, row) for row in rows])
    tokens = mx.zeros((count, 1), dtype=mx.int32)
    # The padding of a batch is read once after a join.
    mx.eval(dense.language_model(tokens, cache=batch).logits)
    with reads_counted(monkeypatch) as reads:
        for _ in range(2):
            output = dense.language_model(tokens, cache=batch)
        assert reads == []
        output.logits.tolist()
        assert reads == ["tolist"]
    with upstream():
        dense.language_model._rope_deltas = mx.array([[0]])
        with reads_counted(monkeypatch) as reads:
            dense.language_model(tokens, cache=batch)
        assert reads != []
    dense.language_model._rope_deltas = dense.language_model._position_ids = None


class OffsetsOnly:
    """A cache of rows that tells no write index: their offsets are only on the device."""

    def __init__(self, offsets: list[int]) -> None:
        self.offset = mx.array(offsets)

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


@pytest.mark.parametrize("offsets", [[5], [5, 9]])
def test_caches_without_a_write_index_are_not_read(
    patched: None, dense: Any, monkeypatch: pytest.MonkeyPatch, offsets: list[int]
) -> None:
    caches = [
        BatchMambaCache(size=2) if layer.is_linear else OffsetsOnly(offsets)
        for layer in dense.language_model.layers
    ]
    seen: list[mx.array] = []
    rotary = dense.language_model.layers[1].self_attn.rotary_emb
    original = type(rotary).__call__
    monkeypatch.setattr(
        type(rotary), "__call__", lambda self, x, ids: (seen.append(ids), original(self, x, ids))[1]
    )
    with reads_counted(monkeypatch) as reads:
        dense.language_model(mx.zeros((len(offsets), 1), dtype=mx.int32), cache=caches)
        assert reads == []
    assert seen[0].tolist() == [[[n] for n in offsets]] * 3


def test_offsets_do_not_become_a_graph(patched: None, dense: Any) -> None:
    rows = mixed_rows()[:3]
    batch = merged([prefill(dense, row) for row in rows])
    for _ in range(4):
        ids = mx.full((3, 3, 1), 7)
        mx.eval(dense.language_model(mx.zeros((3, 1), dtype=mx.int32), cache=batch, position_ids=ids).logits)
    text: list[str] = []
    writer = type("Writer", (), {"write": lambda self, part: text.append(part)})()
    mx.export_to_dot(writer, *[layer.offset for layer in batch if hasattr(layer, "offset")])
    assert "Add" not in "".join(text)


def test_the_left_padded_decode_hint_is_kept(
    patched: None, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    language: Any = importlib.import_module(LANGUAGE)
    calls: list[Any] = []
    original = language._qwen3_5_left_padded_attention
    monkeypatch.setattr(
        language,
        "_qwen3_5_left_padded_attention",
        lambda *args, **kwargs: (calls.append(kwargs["mask"]), original(*args, **kwargs))[1],
    )
    for sizes, expected in (((5, 9), [None, None]), ((6, 6), [])):
        rows = [text_row(n, seed=k) for k, n in enumerate(sizes)]
        batch = merged([prefill(dense, row) for row in rows])
        calls.clear()
        dense.language_model(mx.zeros((2, 1), dtype=mx.int32), cache=batch)
        assert calls == expected


def test_padding_changed_in_place_is_seen(patched: None) -> None:
    language: Any = importlib.import_module(LANGUAGE)
    cache = vlm_caches.BatchKVCache([2, 0])
    assert language._qwen3_5_left_padding_info(cache) == ((2, 0), 2)
    cache.prepare(left_padding=[1, 1])
    assert language._qwen3_5_left_padding_info(cache) == ((3, 1), 3)
    cache.update_and_fetch(*[mx.zeros((2, 1, 4, 1))] * 2)
    cache.prepare(right_padding=[0, 2])
    assert language._qwen3_5_left_padding_info(cache) == ((3, 1), 3)
    cache.finalize()
    assert language._qwen3_5_left_padding_info(cache) == ((3, 3), 3)


def test_several_tokens_verified_at_once(patched: None, dense: Any) -> None:
    """`speculative_verify`: the logits after each drafted token, and a commit of different prefixes."""
    rows = [text_row(5, seed=1), image_row(3, 5, (8, 8), seed=2), text_row(40, seed=3)]
    solo = [alone(dense, row, 5) for row in rows]
    batch = merged([prefill(dense, row) for row in rows])
    drafts = mx.array([row.answer[:3] for row in solo])
    output = dense.language_model(drafts, cache=batch, speculative_verify=True, capture_layer_ids=[])
    for place, row in enumerate(solo):
        for step in range(3):
            assert mx.abs(output.logits[place, step] - row.logits[step + 1]).max().item() < 1e-4
    output.gdn_states.commit([1, 3, 2])
    for place, (row, known) in enumerate(zip(rows, solo, strict=True)):
        kept = [1, 3, 2][place]
        row.answer, row.logits = known.answer[: kept + 1], known.logits[: kept + 1]
    for _ in range(2):
        output = dense.language_model(mx.array([row.answer[-1:] for row in rows]), cache=batch)
        for place, row in enumerate(rows):
            row.take(output.logits[place, -1])
    check(dense, rows)


def test_a_mask_is_cut_to_the_keys(patched: None, dense: Any) -> None:
    """By what the cache holds, also where its write index went round."""
    attention = dense.language_model.layers[1].self_attn
    for cache in (vlm_caches.BatchKVCache([0, 2]), vlm_caches.BatchRotatingKVCache(4, [0, 2])):
        for tokens in (3, 1, 1, 1):
            q = mx.zeros((2, tokens, 4 * 32 * 2))
            kv = mx.zeros((2, tokens, 2 * 32))
            mask = mx.zeros((2, 1, tokens, 50))
            *_, cut = attention._prepare_projected_qkv(q, kv, kv, cache, None, None, mask)
        assert cut.shape[-1] == (4 if cache.size() == 4 else 6)


def test_attention_without_a_cache(patched: None, dense: Any) -> None:
    attention = dense.language_model.layers[1].self_attn
    x = mx.random.normal((2, 5, 64), key=mx.random.key(0))
    ids = mx.broadcast_to(mx.arange(5)[None, None], (3, 2, 5))
    expected = attention(x, mask="causal", position_ids=ids)
    assert mx.array_equal(attention(x, mask="causal"), expected)


# mlx-lm


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_mlx_lm_needs_no_patch(name: str) -> None:
    model: nn.Module = build(FAMILIES[name])
    prompts = [[random.Random(n).randrange(90) for _ in range(n)] for n in (1, 150, 17, 200, 4)]
    solos, first = [], []
    for prompt in prompts:
        caches = model.make_cache()
        logits = model(mx.array([prompt]), cache=caches)[0, -1]
        solos.append(caches)
        first.append(int(mx.argmax(logits).item()))
    batch = [
        BatchMambaCache.merge(list(layer))
        if isinstance(layer[0], lm_caches.ArraysCache)
        else layer[0].merge(list(layer))
        for layer in zip(*solos, strict=True)
    ]
    tokens = mx.array(first)[:, None]
    for _ in range(4):
        logits = model(tokens, cache=batch)[:, -1]
        alone = mx.stack([model(tokens[k : k + 1], cache=solos[k])[0, -1] for k in range(5)])
        assert mx.abs(logits - alone).max().item() < 1e-4
        assert mx.array_equal(mx.argmax(logits, -1), mx.argmax(alone, -1))
        tokens = mx.argmax(logits, -1)[:, None]
