"""From a GGUF file's blocks to the weights of an MLX model.

Block formats: ggml's `ggml-common.h`. What MLX holds as quantized weights: `w = scale * q + bias` per group
of 32 along a row, q unsigned, packed into uint32 from the lowest bits up (mlx.core.quantize, mode "affine").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.gguf_file import GGUFFile, GGUFTensor
from chairlift.engine.models.safetensors_file import PlannedTensor

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_TYPES: tuple[str, ...] = get_args(FloatType)

FLOAT_KINDS: dict[Kind, FloatType] = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}
KEPT_BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}
"""Formats that MLX holds without loss, and their bits a weight."""
GROUP = 32
"""Weights that share a scale, in ggml's blocks of these formats and in the MLX weights made of them."""

_DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PIECE_WEIGHTS = 1 << 22

Rows = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A tensor of the file and the order in which its rows are to be read (None: as they lie)."""

    file: GGUFFile
    tensor: GGUFTensor
    order: npt.NDArray[np.intp] | None = None

    def pieces(self, convert: Callable[[Rows], Array]) -> Iterator[Array]:
        """`convert` over a few megabytes of rows at a time."""
        rows = self.file.rows(self.tensor)
        width = self.tensor.shape[-1] if len(self.tensor.shape) > 1 else 1
        count = max(1, _PIECE_WEIGHTS // width)
        for start in range(0, len(rows), count):
            piece = slice(start, start + count)
            yield convert(rows[piece] if self.order is None else rows[self.order[piece]])


def rope_order(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Row order that undoes llama.cpp's permutation of q and k.

    llama.cpp rotates neighbouring elements (0, 1), (2, 3), …; the models here rotate (0, d/2), (1, d/2 + 1),
    …. Its converter (`LlamaModel.permute`) moves row `half * d/2 + i` of each head to `2 * i + half`.
    """
    order = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


def float_weight(name: str, source: WeightSource, dtype: FloatType) -> PlannedTensor:
    """The weight as plain floats, rounded to nearest.

    Raises (when written):
        ModelUnavailable: a value is too large for float16.
    """
    kind = source.tensor.type

    def convert(rows: Rows) -> Array:
        try:
            return round_to(dtype, dequantize(rows, kind).astype(np.float32, copy=False))
        except OverflowError:
            raise ModelUnavailable(
                f"{source.file.path}: {source.tensor.name} holds values too large for float16; "
                "convert to bfloat16 or float32."
            ) from None

    return PlannedTensor(name, _DTYPE_NAMES[dtype], source.tensor.shape, lambda: source.pieces(convert))


def quantized_weight(name: str, source: WeightSource) -> list[PlannedTensor]:
    """The weight as MLX holds it quantized: `NAME.weight`, `NAME.scales`, `NAME.biases`, exactly what the
    blocks say. `name` ends in `.weight`."""
    layer = name.removesuffix(".weight")
    kind = source.tensor.type
    *rows, width = source.tensor.shape
    packed = (*rows, width * KEPT_BITS[kind] // 32)
    groups = (*rows, width // GROUP)

    def words(blocks: Rows) -> Array:
        return block_words(blocks, kind)

    def scales(blocks: Rows) -> Array:
        return _half(blocks, kind, 0)

    def biases(blocks: Rows) -> Array:
        made = block_biases(blocks, kind)
        if not np.isfinite(made).all():
            raise ModelUnavailable(
                f"{source.file.path}: {source.tensor.name} holds scales too large to keep; "
                "convert to float16, bfloat16 or float32."
            )
        return made

    return [
        PlannedTensor(f"{layer}.weight", "U32", packed, lambda: source.pieces(words)),
        PlannedTensor(f"{layer}.scales", "F16", groups, lambda: source.pieces(scales)),
        PlannedTensor(f"{layer}.biases", "F16", groups, lambda: source.pieces(biases)),
    ]


def block_words(rows: Rows, kind: Kind) -> npt.NDArray[np.uint32]:
    """The quantized values of a row, packed as MLX wants them: `[rows, words]`."""
    if kind is Kind.Q8_0:
        values = _blocks(rows, kind)[..., 2:] ^ np.uint8(0x80)  # int8 to uint8 by adding 128
        return values.reshape(len(rows), -1).view(np.uint32)
    nibbles = _blocks(rows, kind)[..., 2 if kind is Kind.Q4_0 else 4 :]
    # A block's byte j holds values j and j + 16; MLX wants neighbours together, the first in the low bits.
    values = np.concatenate((nibbles & 0xF, nibbles >> 4), axis=-1)
    packed = values[..., 0::2] | (values[..., 1::2] << 4)
    return np.ascontiguousarray(packed).reshape(len(rows), -1).view(np.uint32)


def block_biases(rows: Rows, kind: Kind) -> npt.NDArray[np.float16]:
    """The value that a quantized 0 stands for: `[rows, groups]`. A power of two times the scale, so exact."""
    if kind is Kind.Q4_1:
        return _half(rows, kind, 2)
    with np.errstate(over="ignore"):
        return _half(rows, kind, 0) * np.float16(-128 if kind is Kind.Q8_0 else -8)


def round_to(dtype: FloatType, values: npt.NDArray[np.float32]) -> Array:
    """`values` in `dtype`, ties to even; bfloat16 as its uint16 bits.

    Raises:
        OverflowError: a finite value is beyond float16.
    """
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        if not np.array_equal(np.isfinite(rounded), np.isfinite(values)):
            raise OverflowError
        return rounded
    bits = values.view(np.uint32)
    rounded_bits = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded_bits).astype(np.uint16)


def _blocks(rows: Rows, kind: Kind) -> Rows:
    """`[rows, groups, bytes of a block]`"""
    size = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}[kind]
    return rows.reshape(len(rows), -1, size)


def _half(rows: Rows, kind: Kind, at: int) -> npt.NDArray[np.float16]:
    """The float16 that stands `at` bytes into each block: `[rows, groups]`."""
    two = np.ascontiguousarray(_blocks(rows, kind)[..., at : at + 2])
    return two.view(np.float16)[..., 0]
