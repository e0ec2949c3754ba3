"""Short depthwise convolutions as sums of shifted products, on a CPU and on CUDA.

Upstream, mlx 0.32: on CUDA `mx.conv1d` has cuDNN plan anew for every shape, about 135 ms on an H200, and a
recurrent layer convolves at every length of a chunk and every number of rows; on a CPU it is several times
slower than the products. Both say the same up to rounding. Low precision is summed in float32.

Only for what the recurrent layers do: one filter a channel, a few taps, no stride. Metal is left as it is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.32.4,<0.33"

MOST_TAPS = 8

Layer = Callable[[nn.Conv1d, mx.array], mx.array]


def depthwise(x: mx.array, weight: mx.array, padding: int = 0) -> mx.array:
    """Convolution along the tokens, each channel by itself.

    Args:
        x: `[batch, tokens, channels]`.
        weight: `[channels, taps, 1]`.
        padding: zeros before the first and behind the last token.

    Returns:
        `[batch, tokens + 2 * padding - taps + 1, channels]`, of the type that `x` and `weight` have together.
    """
    taps = weight.shape[1]
    if padding:
        x = mx.pad(x, [(0, 0), (padding, padding), (0, 0)])
    tokens = x.shape[1] - taps + 1
    parts = [x[:, tap : tap + tokens] for tap in range(taps)]
    filters = [weight[:, tap, 0] for tap in range(taps)]
    total: mx.array = (_sum if mx.default_device() == mx.cpu else _sum_at_once)(parts, filters)
    return total


def _sum(parts: Sequence[mx.array], filters: Sequence[mx.array]) -> mx.array:
    """Of products, in float32; then of the type that the arrays have together."""
    products = [
        part.astype(mx.float32) * taps.astype(mx.float32) for part, taps in zip(parts, filters, strict=True)
    ]
    return functools.reduce(operator.add, products).astype(mx.result_type(parts[0], filters[0]))


_sum_at_once = mx.compile(_sum, shapeless=True)
"""One launch on a GPU, where a step is made of launches; a CPU would first run a compiler for seconds."""


def suits(layer: nn.Conv1d, x: mx.array) -> bool:
    """Whether the layer convolves each channel by itself, with few taps, where that is slow."""
    channels, taps, depth = layer.weight.shape
    if x.ndim != 3 or depth != 1 or not layer.groups == channels == x.shape[2] or taps > MOST_TAPS:
        return False
    if layer.stride != 1 or layer.dilation != 1 or x.shape[1] + 2 * layer.padding < taps:
        return False
    return bool(mx.default_device() == mx.cpu or mx.cuda.is_available())


def _by_products(original: Layer) -> Layer:
    @functools.wraps(original)
    def call(self: nn.Conv1d, x: mx.array) -> mx.array:
        if not suits(self, x):
            return original(self, x)
        y = depthwise(x, self.weight, self.padding)
        return y + self.bias if "bias" in self else y

    return call


CONVOLUTIONS = (Replacement("mlx.nn", "Conv1d", "__call__", _by_products),)
