"""Gemma 2's attention under a batch's mask."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gemma2

from chairlift.patches.gemma2 import patch_gemma2_mask, undo_gemma2_mask
from tests.mlx.parity import solo


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    patch_gemma2_mask()
    yield
    patch_gemma2_mask()


def attention() -> nn.Module:
    """4 query heads over 2 KV heads."""
    layer: nn.Module = solo("gemma2").model.model.layers[0].self_attn
    return layer


def masked(rows: int) -> tuple[mx.array, mx.array]:
    """Inputs `[rows, 6, hidden]`, and a causal mask `[rows, 1, 6, 6]` under which row n does not see its
    first n tokens."""
    inputs = mx.random.normal((rows, 6, 64), key=mx.random.key(rows))
    index = mx.arange(6)
    causal = index[:, None] >= index
    hidden = mx.arange(rows)[:, None, None] > index
    return inputs, (causal & ~hidden | mx.eye(6, dtype=mx.bool_))[:, None]


def alone(inputs: mx.array, mask: mx.array) -> mx.array:
    """Row by row under masks of two axes, which upstream gets right."""
    layer = attention()
    rows = [layer(inputs[row : row + 1], mask[row, 0]) for row in range(inputs.shape[0])]
    return mx.concatenate(rows)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_mask_for_each_row(rows: int) -> None:
    inputs, mask = masked(rows)
    got = attention()(inputs, mask)
    assert mx.allclose(got, alone(inputs, mask), rtol=0, atol=1e-5)


def test_upstream_is_wrong_where_rows_and_heads_agree_in_number_and_fails_elsewhere() -> None:
    undo_gemma2_mask()
    inputs, mask = masked(2)
    assert not mx.allclose(attention()(inputs, mask), alone(inputs, mask), rtol=0, atol=1e-3)
    inputs, mask = masked(3)
    with pytest.raises(ValueError, match="broadcast"):
        attention()(inputs, mask)


def test_other_masks_are_as_before() -> None:
    inputs, mask = masked(1)
    with_it = [attention()(inputs, what) for what in (mask[0, 0], None)]
    undo_gemma2_mask()
    without = [attention()(inputs, what) for what in (mask[0, 0], None)]
    assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(with_it, without, strict=True))


def test_it_is_applied_once_and_undone() -> None:
    first = gemma2.Attention.__call__
    assert patch_gemma2_mask()
    assert gemma2.Attention.__call__ is first
    undo_gemma2_mask()
    original = gemma2.Attention.__call__
    undo_gemma2_mask()
    assert gemma2.Attention.__call__ is original is not first
