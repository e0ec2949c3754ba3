"""The contract's part 2: Qwen3.5 rows of any lengths and images, in one batch."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as lm_caches
import mlx_vlm.models.cache as vlm_caches
import pytest

from chairlift.cache.mamba import BatchMambaCache
from chairlift.patches.qwen3_5 import (
    LANGUAGE,
    patch_qwen35_attention_for_batching,
    row_positions,
    undo_qwen35_attention_for_batching,
)
from tests.mlx.families import FAMILIES, build
from tests.patches.qwen35 import (
    Row,
    check,
    delta,
    embed,
    image_row,
    lengths,
    make_model,
    merged,
    mixed_rows,
    nothing,
    prefill,
    serve,
    text_row,
)


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


# The call


def test_it_applies_once_and_is_undone() -> None:
    undo_qwen35_attention_for_batching()  # a model that was loaded before in this process has it applied
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


def padded_caches(model: Any, padding: list[int]) -> list[Any]:
    return [
        vlm_caches.ArraysCache(2, left_padding=padding)
        if layer.is_linear
        else vlm_caches.BatchKVCache(padding)
        for layer in model.language_model.layers
    ]


def test_left_padded_prompts_in_one_batch(patched: None, dense: Any) -> None:
    rows = [text_row(n, seed=n) for n in (3, 12, 7)]
    padding = [12 - len(row.tokens) for row in rows]
    tokens = mx.array([[0] * pad + row.tokens for pad, row in zip(padding, rows, strict=True)])
    batch = padded_caches(dense, padding)
    output = dense.language_model(tokens, cache=batch)
    for step in range(4):
        for place, row in enumerate(rows):
            row.take(output.logits[place, -1])
        if step < 3:
            output = dense.language_model(mx.array([row.answer[-1:] for row in rows]), cache=batch)
    check(dense, rows)


def test_left_padded_prompts_with_images(patched: None, dense: Any) -> None:
    """One index over the batch, padding left out of it."""
    rows = [text_row(20, seed=1), image_row(3, 5, (8, 8), seed=2), image_row(1, 2, (4, 4), seed=3)]
    longest = max(len(row.tokens) for row in rows)
    padding = [longest - len(row.tokens) for row in rows]
    tokens = mx.array([[0] * pad + row.tokens for pad, row in zip(padding, rows, strict=True)])
    pixels = mx.concatenate([row.pixels for row in rows if row.pixels is not None])
    grids = mx.array([grid for row in rows for grid in row.grids])
    embeds = dense.get_input_embeddings(tokens, pixels, image_grid_thw=grids).inputs_embeds
    batch = padded_caches(dense, padding)
    output = dense.language_model(tokens, inputs_embeds=embeds, cache=batch, image_grid_thw=grids)
    for step in range(4):
        for place, row in enumerate(rows):
            row.take(output.logits[place, -1])
        if step < 3:
            output = dense.language_model(mx.array([row.answer[-1:] for row in rows]), cache=batch)
    check(dense, rows)


def test_positions_of_rows() -> None:
    """Offset + tokens + delta; padding still to come counts as position 0."""
    ids = row_positions(mx.array([-2, 7]), 2, 3, mx.array([[0], [-4]]))
    assert ids.tolist() == [[[0, 0, 0], [3, 4, 5]]] * 3
    assert row_positions(5, 2, 1).tolist() == [[[5], [5]]] * 3


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
