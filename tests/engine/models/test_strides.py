"""Weights laid out for a CPU are the same weights, in another order of memory."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from chairlift.engine.models import products
from chairlift.engine.models.loader import cast_weights
from chairlift.engine.models.strides import lay_out_for_cpu, lay_out_if_faster

VOCAB = 50


class Small(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.inner = [nn.Linear(12, 20), nn.Linear(20, 12, bias=False)]
        if not tied:
            self.head = nn.Linear(12, VOCAB, bias=False)

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embedding(ids)
        for layer in self.inner:
            x = layer(x)
        return self.head(x) if "head" in self else self.embedding.as_linear(x)


def by_columns(weight: mx.array) -> bool:
    """Whether a column's numbers lie side by side."""
    strides = np.asarray(memoryview(weight)).strides
    return strides[0] < strides[1]


@pytest.mark.parametrize("tied", [False, True])
def test_products_and_lookups_are_the_same(tied: bool) -> None:
    model, ids = Small(tied), mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    model.inner[1].weight = model.inner[1].weight.astype(mx.float16)
    mx.eval(model.parameters())
    want, weights = model(ids), [np.array(layer.weight) for layer in (*model.inner, model.embedding)]
    lay_out_for_cpu(model, VOCAB)
    assert [by_columns(layer.weight) for layer in (*model.inner, model.embedding)] == [True, False, tied]
    assert tied or by_columns(model.head.weight)
    for layer, weight in zip((*model.inner, model.embedding), weights, strict=True):
        np.testing.assert_array_equal(np.array(layer.weight), weight)
    np.testing.assert_allclose(np.array(model(ids)), np.array(want), rtol=1e-5, atol=1e-6)


def test_modules_that_share_a_weight_go_on_sharing_it() -> None:
    """Cast or laid out, it is in memory once."""
    model = Small(tied=False)
    model.head.weight = model.embedding.weight = model.embedding.weight.astype(mx.bfloat16)
    cast_weights(model, "float32")
    assert model.head.weight is model.embedding.weight
    lay_out_for_cpu(model, VOCAB)
    assert model.head.weight is model.embedding.weight and by_columns(model.head.weight)


def test_an_embedding_that_gives_no_logits_stays() -> None:
    """One that holds a part for each layer is often the largest weight of all."""
    model = Small(tied=True)
    model.parts = nn.Embedding(VOCAB, 3 * 8)
    mx.eval(model.parameters())
    lay_out_for_cpu(model, VOCAB)
    assert by_columns(model.embedding.weight) and not by_columns(model.parts.weight)


@pytest.mark.parametrize("shape", [(1, 1), (64, 3), (65, 200), (200, 65)])
def test_any_shape(shape: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    want = np.array(model.layers[0].weight)
    lay_out_for_cpu(model, VOCAB)
    np.testing.assert_array_equal(np.array(model.layers[0].weight), want)


@pytest.mark.parametrize("faster", [True, False])
def test_weights_are_laid_out_where_that_is_faster(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """By the best try: one that something else held up says nothing."""
    model = Small(tied=False)
    model.inner[1].weight = model.inner[1].weight.astype(mx.float16)
    mx.eval(model.parameters())
    tried = list[int]()

    def seconds(made: Sequence[mx.array]) -> float:
        """As they are, then by columns, and again."""
        assert sorted({product.shape[1] for product in made}) == [20, VOCAB], "float32 alone"
        tried.append(len(made))
        usual = len(tried) % 2 == 1
        return 9.0 if len(tried) <= 2 else 1.0 if usual is not faster else 1.5

    monkeypatch.setattr(products, "_seconds", seconds)
    assert lay_out_if_faster(model, VOCAB) is faster
    assert by_columns(model.inner[0].weight) is faster


def test_products_are_timed() -> None:
    assert products._seconds([mx.ones((20, 12)) @ mx.ones((12, 20))]) > 0
