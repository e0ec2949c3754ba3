"""Weights once more in blocks of columns, for a CPU's products with few rows.

A matrix product on a CPU copies the weight into the order of its inner loop whenever it is called. With a few
rows, as in a decode step, that takes longer than the product itself. OpenBLAS has kernels that read a weight
where it lies, but only for small products (kernel/x86_64/sgemm_small_kernel_permit_skylakex.c), and they are
fast only where a column's neighbours lie side by side. So each weight `[outputs, inputs]` is kept a second
time as `[blocks, inputs, BLOCK]`, and a step of few tokens makes one small product a block. Steps of many
tokens go on with the weight as it is, for which that would be slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.blas import FEW_TOKENS
from chairlift.engine.models.products import pays
from chairlift.engine.models.strides import heads

BLOCK = 32
"""Columns: fewer are slower to read, and with more the products of large weights are no small ones."""
MEMORY_SHARE = 1 / 8
"""Of the memory that there is to use, that the copies may take."""
GAIN = 0.9
"""Of the time as they are, that products by blocks may take to be worth the memory."""


class BlockLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer whose weight is there in blocks, too."""

    _blocks: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        if not _suits(x):
            many: mx.array = super().__call__(x)
            return many
        few = product(x, self._blocks)
        return few + self.bias if "bias" in self else few


class BlockEmbedding(nn.Embedding):  # type: ignore[misc]
    """The same, of an embedding that gives the logits."""

    _blocks: mx.array

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self._blocks) if _suits(x) else super().as_linear(x)


def block_if_faster(model: nn.Module, vocab: int, memory: int) -> int:
    """`keep_blocks`, if products with few rows are faster then and the copies fit into their share of
    `memory`, in bytes. Returns what they take, 0 without any."""
    weights = {id(module.weight): module.weight for module in _multiplied(model, vocab)}
    if not weights or sum(weight.nbytes for weight in weights.values()) > MEMORY_SHARE * memory:
        return 0
    return keep_blocks(model, vocab) if blocks_are_faster(list(weights.values())) else 0


def keep_blocks(model: nn.Module, vocab: int) -> int:
    """Keep the float32 weights of linear layers in blocks as well, and an embedding's where it gives the
    logits. Returns the bytes that the copies take."""
    made: dict[int, mx.array] = {}
    for module in _multiplied(model, vocab):
        key = id(module.weight)
        if key not in made:
            made[key] = in_blocks(module.weight)
            mx.eval(made[key])
        module._blocks = made[key]
        module.__class__ = BlockLinear if isinstance(module, nn.Linear) else BlockEmbedding
    return sum(each.nbytes for each in made.values())


def blocks_are_faster(weights: Sequence[mx.array]) -> bool:
    """Whether products of a few rows with these weights `[outputs, inputs]` are."""
    return pays(weights, in_blocks, product, GAIN)


def in_blocks(weight: mx.array) -> mx.array:
    """`[outputs, inputs]` as `[outputs / BLOCK, inputs, BLOCK]`."""
    outputs, inputs = weight.shape
    return mx.contiguous(weight.reshape(outputs // BLOCK, BLOCK, inputs).swapaxes(1, 2))


def product(x: mx.array, blocks: mx.array) -> mx.array:
    """`[..., inputs]` by a weight in blocks: `[..., outputs]`."""
    *shape, inputs = x.shape
    parts = x.reshape(-1, inputs) @ blocks
    return parts.swapaxes(0, 1).reshape(*shape, blocks.shape[0] * BLOCK)


def _suits(x: mx.array) -> bool:
    return x.dtype == mx.float32 and x.size <= FEW_TOKENS * x.shape[-1]


def _multiplied(model: nn.Module, vocab: int) -> list[nn.Module]:
    """The layers whose weights can be had in blocks."""
    modules = [module for _, module in model.named_modules()]
    linear = [module for module in modules if type(module) is nn.Linear]
    embeddings = [module for module in modules if type(module) is nn.Embedding]
    return [
        module
        for module in linear + heads(linear, embeddings, vocab)
        if module.weight.dtype == mx.float32
        and module.weight.ndim == 2
        and module.weight.shape[0] % BLOCK == 0
    ]
