"""A weight in blocks gives the products that the weight gives, and is made where that is faster and fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from chairlift.engine.blas import FEW_TOKENS
from chairlift.engine.models import blocks, loader, products
from chairlift.engine.models.blocks import BlockEmbedding, BlockLinear, block_if_faster, in_blocks, product
from tests.mlx.test_quantized_kv import folder

VOCAB = 96
PLENTY = 2**30


class Small(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.inner = [nn.Linear(12, 64), nn.Linear(64, 32, bias=False), nn.Linear(32, 12, bias=False)]
        if not tied:
            self.head = nn.Linear(12, VOCAB, bias=False)

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embedding(ids)
        for layer in self.inner:
            x = layer(x)
        return self.head(x) if "head" in self else self.embedding.as_linear(x)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "blocks_are_faster", lambda weights: True)


@pytest.mark.parametrize("rows", [1, 3, FEW_TOKENS])
def test_a_product_is_that_of_the_weight(rows: int) -> None:
    draw = np.random.default_rng(rows)
    x, weight = draw.normal(size=(rows, 1, 7)), draw.normal(size=(160, 7))
    found = product(mx.array(x, dtype=mx.float32), in_blocks(mx.array(weight, dtype=mx.float32)))
    assert found.shape == (rows, 1, 160)
    np.testing.assert_allclose(np.array(found), x @ weight.T, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("tied", [False, True])
def test_few_tokens_go_by_blocks_and_many_by_the_weight(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    model = Small(tied)
    few, many = mx.array([[1] * FEW_TOKENS]), mx.array([[2] * (FEW_TOKENS + 1)])
    want, names = (model(few), model(many)), [name for name, _ in tree_flatten(model.parameters())]
    mx.eval(want)
    assert block_if_faster(model, VOCAB, PLENTY) == 4 * (12 * 64 + 64 * 32 + 12 * VOCAB)
    assert [type(layer) for layer in model.inner] == [BlockLinear, BlockLinear, nn.Linear], "12 is no block"
    assert type(model.embedding) is (BlockEmbedding if tied else nn.Embedding)
    assert [name for name, _ in tree_flatten(model.parameters())] == names, "the copies are no parameters"
    np.testing.assert_allclose(np.array(model(few)), np.array(want[0]), rtol=1e-5, atol=1e-6)

    monkeypatch.setattr(blocks, "product", lambda x, weight: pytest.fail("many tokens"))
    np.testing.assert_array_equal(np.array(model(many)), np.array(want[1]))


@pytest.mark.usefixtures("faster")
def test_modules_that_share_a_weight_share_its_blocks() -> None:
    model = Small(tied=False)
    model.inner.append(nn.Linear(12, 64))
    model.inner[3].weight = model.inner[0].weight
    assert block_if_faster(model, VOCAB, PLENTY) == 4 * (12 * 64 + 64 * 32 + 12 * VOCAB)
    assert model.inner[3]._blocks is model.inner[0]._blocks


@pytest.mark.usefixtures("faster")
def test_weights_that_are_no_float32_stay() -> None:
    model = Small(tied=True)
    model.inner[0].weight = model.inner[0].weight.astype(mx.float16)
    block_if_faster(model, VOCAB, PLENTY)
    assert [type(layer) for layer in model.inner[:2]] == [nn.Linear, BlockLinear]


@pytest.mark.usefixtures("faster")
def test_there_are_no_copies_that_take_more_than_their_share() -> None:
    model, size = Small(tied=False), 4 * (12 * 64 + 64 * 32 + 12 * VOCAB)
    assert block_if_faster(model, VOCAB, 8 * size - 8) == 0
    assert type(model.inner[0]) is nn.Linear
    assert block_if_faster(model, VOCAB, 8 * size) == size


@pytest.mark.parametrize("by_blocks, worth", [(0.7, True), (0.9, False)])
def test_what_gains_little_is_not_worth_the_memory(
    monkeypatch: pytest.MonkeyPatch, by_blocks: float, worth: bool
) -> None:
    """By the best try: one that something else held up says nothing."""
    model, tried = Small(tied=False), list[bool]()

    def seconds(made: Sequence[mx.array]) -> float:
        mx.eval(made)
        tried.append(len(tried) % 2 == 1)
        return 9.0 if len(tried) <= 2 else by_blocks if tried[-1] else 1.0

    monkeypatch.setattr(products, "_seconds", seconds)
    size = block_if_faster(model, VOCAB, PLENTY)
    assert (size > 0) is worth and (type(model.inner[0]) is BlockLinear) is worth


@pytest.mark.usefixtures("faster")
def test_a_load_counts_the_copies_among_the_weights(tmp_path: Path) -> None:
    path = folder(tmp_path / "llama", "llama")
    plain, blocked = (loader.load_model(path, "up", memory=limit) for limit in (1, PLENTY))
    assert blocked.info.parameters == plain.info.parameters
    assert plain.info.weight_bytes < blocked.info.weight_bytes <= 2 * plain.info.weight_bytes
    for loaded in (plain, blocked):
        loaded.runner.close()
