"""Gated delta layers: the reference that the CUDA kernel is held to, and who is handed to it."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta as upstream

from chairlift.patches import gated_delta as patch

Arrays = tuple[mx.array, ...]


def inputs(vector: bool = False, key_dim: int = 32, dtype: mx.Dtype = mx.float32) -> Arrays:
    keys = iter(mx.random.split(mx.random.key(3), 6))
    q, k = (mx.random.normal((2, 5, 2, key_dim), key=next(keys)) * key_dim**-0.5 for _ in range(2))
    v = mx.random.normal((2, 5, 4, 16), key=next(keys))
    g = mx.random.uniform(0.8, 1.0, (2, 5, 4, *((key_dim,) if vector else ())), key=next(keys))
    beta = mx.random.uniform(shape=(2, 5, 4), key=next(keys))
    state = mx.random.normal((2, 4, 16, key_dim), key=next(keys))
    return *(array.astype(dtype) for array in (q, k, v)), g, beta, state


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_reference_is_upstreams_recurrence(vector: bool, masked: bool) -> None:
    arrays = inputs(vector)
    mask = mx.array([[True] * 5, [False, False, True, False, True]]) if masked else None
    want_y, want_state = upstream.gated_delta_ops(*arrays, mask)
    y, state = patch.reference(*arrays, mask)
    assert np.allclose(np.asarray(state), np.asarray(want_state), atol=1e-5)
    seen = np.asarray(mask) if mask is not None else np.ones((2, 5), dtype=bool)
    assert np.allclose(np.asarray(y)[seen], np.asarray(want_y)[seen], atol=1e-5)
    assert not np.asarray(y)[~seen].any()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arrays]]:
    """The patch is in place; a stand-in for the kernel notes what it is given."""
    calls = list[Arrays]()

    def kernel(*arrays: mx.array) -> Arrays:
        calls.append(arrays)
        return patch.reference(*arrays)

    monkeypatch.setattr(patch, "gated_delta", kernel)
    monkeypatch.setattr(patch, "kernel_agrees", lambda *_: True)
    undone = [replacement for replacement in patch.LM if not replacement.applied()]
    for replacement in undone:
        assert replacement.apply()
    yield calls
    for replacement in undone:
        replacement.undo()


@pytest.mark.parametrize("vector", [False, True])
def test_upstreams_update_goes_to_the_kernel(calls: list[Arrays], vector: bool) -> None:
    arrays = inputs(vector)
    q, k, v, _, beta, _ = arrays
    a = mx.random.normal((2, 5, 4, *((32,) if vector else ())), key=mx.random.key(1))
    weights = mx.ones((4, 1) if vector else (4,)), mx.zeros((4, 32) if vector else (4,))
    y, state = upstream.gated_delta_update(q, k, v, a, beta, *weights)
    (given,) = calls
    assert given[5].shape == (2, 4, 16, 32) and not given[5].any() and given[5].dtype == mx.float32
    original = upstream.gated_delta_ops.__chairlift_original__
    want_y, want_state = original(*given)
    assert np.allclose(np.asarray(y), np.asarray(want_y), atol=1e-5)
    assert np.allclose(np.asarray(state), np.asarray(want_state), atol=1e-5)


def test_shapes_it_is_not_written_for_go_to_upstream(calls: list[Arrays]) -> None:
    y, _ = upstream.gated_delta_ops(*inputs(key_dim=24))
    assert not calls and y.shape == (2, 5, 4, 16)


def test_without_a_cuda_device_nothing_changes() -> None:
    if not mx.cuda.is_available():
        assert not patch.kernel_agrees(128, False, mx.float32)
