"""Writing a safetensors file piece by piece, so that a model of any size takes little memory.

Format: huggingface/safetensors, README, "Format": the length of the header (u64), the header (JSON, names to
dtype, shape and offsets), then the tensors' bytes end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written. `pieces` makes its data, in row-major order, when its turn comes."""

    name: str
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, tensors: Sequence[PlannedTensor]) -> Iterator[int]:
    """Write `path`, yielding the data bytes written so far; it is whole when the iterator ends.

    Raises:
        ValueError: pieces do not add up to the planned size.
    """
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        end = 0
        for tensor in tensors:
            end += tensor.nbytes
            for piece in tensor.pieces():
                written += file.write(piece.tobytes())
                yield written
            if written != end:
                raise ValueError(f"{tensor.name}: the pieces hold other than {tensor.nbytes} bytes")
