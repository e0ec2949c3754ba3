"""Chunk attention by matrix products and at padded lengths against a float64 reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from chairlift.cache.attention import CohortKV
from chairlift.cache.prefill import composed, padded
from chairlift.cache.views import AttendView, SeamMask, SpanStep

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.3


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    out = np.zeros((1, HEADS, q.shape[2], v.shape[3]))
    for head in range(HEADS):
        scores = SCALE * q[0, head].astype(np.float64) @ k[0, head * KV_HEADS // HEADS].T.astype(np.float64)
        weights = np.where(allowed, np.exp(scores), 0.0)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(float(sinks[head]))
        out[0, head] = weights / total @ v[0, head * KV_HEADS // HEADS].astype(np.float64)
    return out


@pytest.mark.parametrize("attend", [composed, padded])
@pytest.mark.parametrize(("tokens", "held"), [(1, 1), (5, 5), (7, 40), (64, 1024), (33, 1030)])
@pytest.mark.parametrize("kind", ["none", "causal", "window"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_chunk_equals_the_reference(
    attend: object, tokens: int, held: int, kind: str, with_sinks: bool
) -> None:
    rng = np.random.default_rng(tokens * held)
    q = rng.normal(size=(1, HEADS, tokens, DIM)).astype(np.float32)
    k, v = (rng.normal(size=(1, KV_HEADS, held, DIM)).astype(np.float32) for _ in range(2))
    sinks = rng.normal(size=HEADS).astype(np.float32) if with_sinks else None
    place = np.arange(held - tokens, held)[:, None] - np.arange(held)[None]
    allowed = {"none": place >= -held, "causal": place >= 0, "window": (place >= 0) & (place < 9)}[kind]
    mask = {"none": None, "causal": "causal", "window": mx.array(allowed)}[kind]
    got = attend(  # type: ignore[operator]
        mx.array(q),
        mx.array(k),
        mx.array(v),
        scale=SCALE,
        mask=mask,
        sinks=mx.array(sinks) if sinks is not None else None,
    )
    np.testing.assert_allclose(np.array(got), reference(q, k, v, allowed, sinks), atol=2e-6)


def test_padding_of_a_flat_step_touches_no_row() -> None:
    """Tokens that belong to nobody get zeros, are stored nowhere, and change no other token's output."""
    q, k, v = (mx.random.normal((8, heads, 1, DIM), key=mx.random.key(heads)) for heads in (6, 2, 2))
    outputs, caches = [], []
    for padding in (0, 3):
        cache, tokens = KVCache(), 5 + padding
        view = AttendView(CohortKV(), None, mx.arange(tokens), [(SpanStep(0, 5, 0), cache)], padding)
        keys, _ = view.update_and_fetch(k[:tokens], v[:tokens])
        outputs.append(keys.attend(q[:tokens], scale=SCALE, mask=SeamMask()))
        caches.append(cache)
    assert caches[1].offset == 5
    assert mx.array_equal(outputs[0], outputs[1][:5])
    assert not outputs[1][5:].any()
