"""What a Qwen3.5 step reads of the device, and what of upstream's it keeps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx_vlm.models.cache as vlm_caches
import pytest

from chairlift.cache.mamba import BatchMambaCache
from chairlift.patches.qwen3_5 import (
    LANGUAGE,
    patch_qwen35_attention_for_batching,
    undo_qwen35_attention_for_batching,
)
from tests.patches.qwen35 import (
    alone,
    check,
    image_row,
    make_model,
    merged,
    mixed_rows,
    prefill,
    text_row,
    upstream,
)


@pytest.fixture(scope="module")
def dense() -> Any:
    return make_model("qwen3_5")


@pytest.fixture
def patched() -> Iterator[None]:
    assert patch_qwen35_attention_for_batching() is True
    yield
    undo_qwen35_attention_for_batching()


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


@pytest.mark.parametrize(
    "options", [{}, {"prefill_step_size": 7}, {"kv_bits": 8, "kv_group_size": 32}], ids=str
)
def test_mlx_vlm_s_own_generation_goes_on(patched: None, dense: Any, options: dict[str, int]) -> None:
    """It tells a decode step nothing, and counted on what the model had kept of the prompt."""
    generation: Any = importlib.import_module("mlx_vlm.generate.ar")
    row = image_row(3, 5, (8, 8), seed=2)
    steps = generation.generate_step(
        mx.array([row.tokens]),
        dense,
        row.pixels,
        None,
        max_tokens=6,
        image_grid_thw=mx.array(row.grids),
        **options,
    )
    assert [int(token) for token, _ in steps] == alone(dense, row, 5).answer
