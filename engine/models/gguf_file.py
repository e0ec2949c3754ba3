"""Reading a GGUF file: its metadata, and its tensors as raw blocks.

The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. The `gguf` package has a reader
too; this one says in one line what is wrong with a damaged file, and reads a vocabulary in milliseconds
where that one takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from chairlift.engine.errors import ModelUnavailable

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in NumPy's order (GGUF stores it reversed)."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    Raises:
        ModelUnavailable: not GGUF, of another version or byte order, truncated, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise ModelUnavailable(f"{path} is empty.") from None
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read: {error.strerror}.") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        """Keys to bool, int, float, str, or a list of one of these."""
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except UnicodeDecodeError:
            raise self.damaged("holds text that is not UTF-8") from None

    def damaged(self, how: str) -> ModelUnavailable:
        return ModelUnavailable(f"{self.path} is not a sound GGUF file: it {how}.")

    def rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, `[rows, bytes of a row]`, mapped and not copied. A vector is a column: one
        element a row."""
        rows = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(rows, -1)

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelUnavailable(f"{self.path} is not a GGUF file.")
        self._at = 4
        version = self._unpack("<I")
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                raise ModelUnavailable(f"{self.path} is a big-endian GGUF file; only little-endian is read.")
            raise ModelUnavailable(f"{self.path} is GGUF version {version}; versions 2 and 3 are read.")
        tensor_count, key_count = self._unpack("<Q"), self._unpack("<Q")
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("<I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self.damaged("has an impossible alignment")
        data = -(-self._at // alignment) * alignment
        for info in infos:
            self._place(*info, data)

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int, data: int) -> None:
        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.damaged(f"holds {name} in an unknown format ({code})") from None
        if not shape or 0 in shape or shape[-1] % block:
            raise self.damaged(f"holds {name} in an impossible shape")
        if name in self.tensors:
            raise self.damaged(f"holds {name} twice")
        nbytes = math.prod(shape) // block * block_bytes
        if data + offset + nbytes > len(self._map):
            raise self.damaged(f"ends before the data of {name}: it is truncated")
        self.tensors[name] = GGUFTensor(name, kind, shape, data + offset, nbytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._unpack("<I")
        if dimensions > 4:
            raise self.damaged(f"gives {name} {dimensions} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(dimensions))[::-1]
        return name, shape, self._unpack("<I"), self._unpack("<Q")

    def _take(self, count: int) -> int:
        """Step over `count` bytes; the position before them."""
        at = self._at
        if count > len(self._map) - at:
            raise self.damaged("ends in its header: it is truncated")
        self._at = at + count
        return at

    def _unpack(self, form: str) -> int:
        value: int = struct.unpack_from(form, self._map, self._take(struct.calcsize(form)))[0]
        return value

    def _string(self) -> str:
        length = self._unpack("<Q")
        at = self._take(length)
        return self._map[at : at + length].decode()

    def _value(self, code: int) -> Any:
        if code == _STRING:
            return self._string()
        if code == _ARRAY:
            of, count = self._unpack("<I"), self._unpack("<Q")
            if of in _SCALARS:
                dtype = _SCALARS[of]
                return np.frombuffer(self._map, dtype, count, self._take(count * dtype.itemsize)).tolist()
            if of == _STRING:
                return [self._string() for _ in range(count)]
            raise self.damaged(f"holds a list of an unknown kind ({of})")
        if code in _SCALARS:
            dtype = _SCALARS[code]
            return np.frombuffer(self._map, dtype, 1, self._take(dtype.itemsize))[0].item()
        raise self.damaged(f"holds a value of an unknown kind ({code})")
