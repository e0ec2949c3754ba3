"""The order in which a CPU finds a model's weights.

A matrix product on a CPU copies the weight into the order of its inner loop, block by block, whenever it is
called. With a few rows, as in a decode step, that is a third of its time on some CPUs, and faster where the
weight lies column by column; on others it is slower then. So some weights are tried. The shape stays
`[outputs, inputs]`, only the strides change.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.models.products import pays

_ROWS = 64
"""Of a weight that are copied at a time: three times as fast as all at once, which misses the cache with
every number."""
GAIN = 0.97
"""Of the time as they are, that products by columns may take to be worth it."""


def lay_out_if_faster(model: nn.Module, vocab: int) -> bool:
    """`lay_out_for_cpu`, if products with few rows are faster then here; says whether."""
    linear = [module.weight for _, module in model.named_modules() if isinstance(module, nn.Linear)]
    weights = [weight for weight in linear if weight.dtype == mx.float32 and weight.ndim == 2]
    if not pays(weights, _by_columns, lambda x, weight: x @ weight.T, GAIN):
        return False
    lay_out_for_cpu(model, vocab)
    return True


def lay_out_for_cpu(model: nn.Module, vocab: int) -> None:
    """Lay the float32 weights of linear layers out by columns, one after another; an embedding's too where no
    linear layer is as wide as the vocabulary, for then it gives the logits as well."""
    modules = [module for _, module in model.named_modules()]
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    multiplied = linear + heads(linear, embeddings, vocab)
    sharers: dict[int, list[nn.Module]] = {id(module.weight): [] for module in multiplied}
    for module in linear + embeddings:
        if id(module.weight) in sharers:
            sharers[id(module.weight)].append(module)
    for group in sharers.values():
        weight = group[0].weight
        if weight.dtype == mx.float32 and weight.ndim == 2:
            weight = _by_columns(weight)
            for module in group:
                module.weight = weight


def heads(linear: Sequence[nn.Module], embeddings: Sequence[nn.Module], vocab: int) -> list[nn.Module]:
    """Embeddings that give the logits: as wide as what linear layers take, which one of all layers' parts is
    not."""
    widths = {module.weight.shape[1] for module in linear}
    if any(module.weight.shape[0] == vocab for module in linear):
        return []
    return [each for each in embeddings if each.weight.shape[0] == vocab and each.weight.shape[1] in widths]


def _by_columns(weight: mx.array) -> mx.array:
    rows, columns = weight.shape
    laid = mx.zeros((columns, rows))
    for start in range(0, rows, _ROWS):
        laid[:, start : start + _ROWS] = weight[start : start + _ROWS].T
    laid = mx.contiguous(laid)  # what is set as a whole keeps its own strides
    mx.eval(laid)
    return laid.T
