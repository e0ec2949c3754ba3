"""How much memory a model's weights will take, from the headers of its files: nothing is loaded.

Format: huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""What a cast of the weights changes: bytes of a number."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MOST_HEADER = 100 * 2**20
"""Bytes; as the format's own readers bound it."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """
    Attributes:
        loaded: of the model, once it is there.
        peak: while it loads: what the files hold and what is made of it may be there side by side.
    """

    loaded: int
    peak: int


def weight_bytes(folder: Path, dtype: str | None) -> WeightBytes:
    """What the weights of a model folder will take at most; parts that a model leaves out count too.

    Args:
        dtype: that floating weights are cast to; None casts nothing.

    Raises:
        ValueError: a file is no safetensors file; one line, without its path.
    """
    stored = loaded = 0
    for file in sorted(folder.glob("*.safetensors")):
        for kind, size, numbers in _tensors(file):
            stored += size
            loaded += numbers * DTYPE_BYTES[dtype] if dtype is not None and kind in FLOATS else size
    return WeightBytes(loaded, loaded if loaded == stored else loaded + stored)


def _tensors(file: Path) -> Iterator[tuple[str, int, int]]:
    """(type, bytes, numbers) of each tensor."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MOST_HEADER:
                raise ValueError("the header is too long")
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                yield str(tensor["dtype"]), int(stop) - int(start), math.prod(map(int, tensor["shape"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name} is no safetensors file ({type(error).__name__})") from error
