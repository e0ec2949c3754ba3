"""Depthwise convolutions as sums of products: equal to a float64 reference, and in the layers' place."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from chairlift.patches import depthwise_conv
from chairlift.patches.depthwise_conv import CONVOLUTIONS, depthwise, suits


def reference(x: np.ndarray, weight: np.ndarray, padding: int) -> np.ndarray:
    x = np.pad(x.astype(np.float64), [(0, 0), (padding, padding), (0, 0)])
    taps = weight.shape[1]
    windows = [x[:, at : at + taps] for at in range(x.shape[1] - taps + 1)]
    return np.stack([(window * weight[:, :, 0].T).sum(axis=1) for window in windows], axis=1)


@pytest.mark.parametrize(("rows", "tokens", "taps", "padding"), [(1, 4, 4, 0), (3, 9, 4, 0), (2, 5, 3, 2)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_it_is_right(rows: int, tokens: int, taps: int, padding: int, dtype: mx.Dtype) -> None:
    x = mx.random.normal((rows, tokens, 6), key=mx.random.key(1)).astype(dtype)
    weight = mx.random.normal((6, taps, 1), key=mx.random.key(2)).astype(dtype)
    got = depthwise(x, weight, padding)
    want = reference(*(np.asarray(a.astype(mx.float32)) for a in (x, weight)), padding)
    assert got.dtype == dtype and got.shape == want.shape
    bound = 1e-5 if dtype == mx.float32 else 1e-2
    assert np.allclose(np.asarray(got.astype(mx.float32)), want, rtol=bound, atol=bound)


@pytest.fixture
def patched() -> Iterator[None]:
    undone = [replacement for replacement in CONVOLUTIONS if not replacement.applied()]
    for replacement in undone:
        assert replacement.apply()
    yield
    for replacement in undone:
        replacement.undo()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_says_what_upstreams_says(patched: None, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv1d(8, 8, 4, groups=8, bias=bias)
    if bias:
        layer.bias = mx.arange(8, dtype=mx.float32)
    x = mx.random.normal((2, 7, 8), key=mx.random.key(3))
    want = nn.Conv1d.__call__.__chairlift_original__(layer, x)
    taken = []
    monkeypatch.setattr(depthwise_conv, "depthwise", lambda *args: taken.append(args) or depthwise(*args))
    assert mx.allclose(layer(x), want, atol=1e-5)
    assert len(taken) == (mx.default_device() == mx.cpu or mx.cuda.is_available())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 8, 4),
        nn.Conv1d(8, 8, 4, groups=4),
        nn.Conv1d(8, 16, 4, groups=8),
        nn.Conv1d(8, 8, 4, groups=8, stride=2),
        nn.Conv1d(8, 8, 9, groups=8),
    ],
)
def test_other_convolutions_are_upstreams(patched: None, layer: nn.Conv1d) -> None:
    x = mx.ones((1, 12, 8))
    assert not suits(layer, x)
    assert mx.array_equal(layer(x), nn.Conv1d.__call__.__chairlift_original__(layer, x))
