"""Attention without exponentials against a float64 reference."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from chairlift.cache import cpu_attention as module
from chairlift.cache.cpu_attention import (
    LEAST_SCORES,
    compiler_works,
    cpu_attends,
    cpu_attention,
    exp2,
    fast_exp2,
)
from chairlift.cache.prefill import attend_span

DIM, WIDTH, SCALE = 16, 24, 0.3


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    """`allowed`: boolean, `[rows, 1, tokens, held]` or what broadcasts to it."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (array.astype(np.float64) for array in (q, k.repeat(group, 1), v.repeat(group, 1)))
    scores = np.where(allowed, SCALE * q @ k.swapaxes(-1, -2), -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64)[:, None, None] - most)
    return weights / total @ v


def drawn(seed: int, *shape: int, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.integers(1, 90),
    before=st.integers(0, 300),
    kind=st.sampled_from(["none", "causal", "window"]),
    with_sinks=st.booleans(),
    tile=st.sampled_from([512, 4096, module.TILE_SCORES]),
    size=st.sampled_from([0.1, 1.0, 30.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_chunk_equals_the_reference(
    kv_heads: int,
    group: int,
    tokens: int,
    before: int,
    kind: str,
    with_sinks: bool,
    tile: int,
    size: float,
) -> None:
    """However it falls into tiles, and however far its scores lie apart."""
    heads, held = kv_heads * group, before + tokens
    q, k = drawn(1, 1, heads, tokens, DIM, size=size), drawn(2, 1, kv_heads, held, DIM)
    v, sinks = drawn(3, 1, kv_heads, held, WIDTH), drawn(4, heads) if with_sinks else None
    place = np.arange(before, held)[:, None] - np.arange(held)[None]
    allowed = {"none": place >= -held, "causal": place >= 0, "window": (place >= 0) & (place < 9)}[kind]
    mask = {"none": None, "causal": "causal", "window": mx.array(allowed)}[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_SCORES", tile)
        got = cpu_attention(
            *(mx.array(each) for each in (q, k, v)),
            scale=SCALE,
            mask=mask,
            sinks=mx.array(sinks) if sinks is not None else None,
            known={},
        )
    assert got.shape == (1, heads, tokens, WIDTH)
    np.testing.assert_allclose(np.array(got), reference(q, k, v, allowed, sinks), atol=2e-6 * max(1.0, size))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("tile", [512, module.TILE_SCORES])
def test_rows_of_their_own_lengths_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, with_sinks: bool, tile: int
) -> None:
    """What lies behind a row's end is not seen, whatever it is."""
    monkeypatch.setattr(module, "TILE_SCORES", tile)
    lengths = np.array([1, 40, 300, 7, 299])
    q, k, v = drawn(1, 5, 6, 1, DIM), drawn(2, 5, 2, 300, DIM), drawn(3, 5, 2, 300, WIDTH)
    k[0, :, 1:] = 1e6
    v[0, :, 1:] = 1e6
    sinks = drawn(4, 6) if with_sinks else None
    allowed = (np.arange(300)[None] < lengths[:, None])[:, None, None]
    known: dict[object, object] = {}
    for _ in range(2):  # the second layer finds what the first one made
        got = cpu_attention(
            *(mx.array(each) for each in (q, k, v)),
            scale=SCALE,
            mask=mx.array(allowed),
            sinks=mx.array(sinks) if sinks is not None else None,
            known=known,
        )
        np.testing.assert_allclose(np.array(got), reference(q, k, v, allowed, sinks), atol=2e-6)


def test_masks_are_made_once_a_step() -> None:
    q, k, v = (mx.array(drawn(each, 1, 2, 100, DIM)) for each in range(3))
    known: dict[object, object] = {}
    for _ in range(3):
        cpu_attention(q, k, v, scale=SCALE, mask="causal", known=known)
    assert len(known) == 1


def test_powers_of_two() -> None:
    x = np.concatenate([np.linspace(-126, 0, 100_001), -np.arange(127.0), -np.arange(126) - 0.5])
    x = x.astype(np.float32)
    got = np.array(exp2(mx.array(x)))
    np.testing.assert_allclose(got, np.exp2(x.astype(np.float64)), rtol=3e-7)
    assert np.array(exp2(mx.array([-1000.0, -1e30, 0.0]))).tolist() == [2.0**-126, 2.0**-126, 1.0]
    assert np.isnan(np.array(exp2(mx.array(float("nan")))))


def test_a_row_that_went_wrong_shows_it_and_leaves_the_others() -> None:
    q, k, v = drawn(1, 2, 6, 1, DIM), drawn(2, 2, 2, 5000, DIM), drawn(3, 2, 2, 5000, DIM)
    k[0, 0, 17] = np.nan
    got = np.array(cpu_attention(*map(mx.array, (q, k, v)), scale=SCALE, mask=None, known={}))
    assert np.isnan(got[0, :3]).all() and not np.isnan(got[0, 3:]).any()
    np.testing.assert_allclose(got[1:], reference(q[1:], k[1:], v[1:], np.array(True), None), atol=2e-6)


def test_it_is_for_float32_of_some_size() -> None:
    q, k = mx.zeros((1, 4, 64, DIM)), mx.zeros((1, 2, LEAST_SCORES // 256, DIM))
    assert cpu_attends(q, k, k)
    assert not cpu_attends(q, k[:, :, 1:], k[:, :, 1:])
    assert not cpu_attends(q.astype(mx.float16), k, k)


def test_a_prompt_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*_: object, **__: object) -> mx.array:
        raise AssertionError("the fused call")

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    cache = KVCache()
    k, v = cache.update_and_fetch(*(mx.array(drawn(each, 1, 2, 90, DIM)) for each in (2, 3)))
    q = mx.array(drawn(1, 1, 4, 90, DIM))
    got = attend_span(q, k, v, scale=SCALE, mask="causal")
    allowed = np.tril(np.ones((90, 90), dtype=bool))
    np.testing.assert_allclose(np.array(got), reference(*map(np.array, (q, k, v)), allowed, None), atol=2e-6)


def test_layers_of_other_heads_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer heads make larger tiles, whose masks are others."""
    monkeypatch.setattr(module, "TILE_SCORES", 2048)
    lengths, chunk = np.array([300, 40, 299, 7]), mx.array(np.tri(90, 90) - np.tri(90, 90, -9) > 0)
    allowed = mx.array((np.arange(300)[None] < lengths[:, None])[:, None, None])
    for rows, tokens, held, mask in ((4, 1, 300, allowed), (1, 90, 90, chunk)):
        known: dict[object, object] = {}
        for heads in (64, 8, 2):
            q = drawn(1, rows, heads, tokens, DIM)
            k, v = drawn(2, rows, 2, held, DIM), drawn(3, rows, 2, held, WIDTH)
            got = cpu_attention(*map(mx.array, (q, k, v)), scale=SCALE, mask=mask, known=known)
            np.testing.assert_allclose(np.array(got), reference(q, k, v, np.array(mask), None), atol=2e-6)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_keys_out_of_sight_take_no_weight_whatever_the_scores(size: float) -> None:
    q, k, v = drawn(1, 1, 4, 80, DIM, size=size), drawn(2, 1, 2, 200, DIM), drawn(3, 1, 2, 200, WIDTH)
    allowed = np.tri(80, 200, 120, dtype=bool)
    got = cpu_attention(*map(mx.array, (q, k, v)), scale=SCALE, mask="causal", known={})
    np.testing.assert_allclose(np.array(got), reference(q, k, v, allowed, None), atol=2e-5)


def test_a_query_that_sees_nothing_gets_numbers() -> None:
    """As from the fused call: the mean of all values."""
    q, k, v = drawn(1, 2, 4, 1, DIM), drawn(2, 2, 2, 200, DIM), drawn(3, 2, 2, 200, WIDTH)
    allowed = mx.array([[True], [False]])[:, None, None] & (mx.arange(200) >= 0)
    got = np.array(cpu_attention(*map(mx.array, (q, k, v)), scale=SCALE, mask=allowed, known={}))
    np.testing.assert_allclose(got[1], v[1].mean(1).repeat(2, 0)[:, None], atol=2e-6)


def test_compiled_powers_are_the_same_on_any_thread() -> None:
    """An engine's thread comes and goes, and the next one compiles what it needs."""
    x = mx.array(np.linspace(-140.0, 0.0, 3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7))
    want, got = np.array(exp2(x)), list[np.ndarray]()
    assert compiler_works()

    def compute() -> None:
        got.append(np.array(fast_exp2(x - 0.0)))

    for thread in [threading.Thread(target=compute) for _ in range(3)]:
        thread.start()
        thread.join()
    assert len(got) == 3
    for each in got:
        np.testing.assert_array_equal(each, want)


def test_without_a_compiler_powers_are_computed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: mx.array) -> mx.array:
        raise RuntimeError("[Compile::eval_cpu] Failed to compile function")

    monkeypatch.setattr(module, "_compiled", (fail, fail))
    compiler_works.cache_clear()
    try:
        assert not compiler_works()
        assert fast_exp2(mx.array([-1.0, 0.0])).tolist() == [0.5, 1.0]
    finally:
        compiler_works.cache_clear()
