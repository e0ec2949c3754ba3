"""Encoded images, kept by content, bounded in bytes. Used on the MLX thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

DEFAULT_BYTES = 256 * 2**20


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class EncodedImages(Generic[T]):
    """Least recently used out first. One for each loaded model: keys are the digests of the images.

    Args:
        capacity: bytes; what is larger alone is not kept.
    """

    def __init__(self, capacity: int = DEFAULT_BYTES) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable) -> T | None:
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    def put(self, key: Hashable, value: T) -> None:
        """Keep `value` in place of what had its key."""
        old = self._kept.pop(key, None)
        if old is not None:
            self.nbytes -= old.nbytes
        if value.nbytes > self.capacity:
            return
        self._kept[key] = value
        self.nbytes += value.nbytes
        while self.nbytes > self.capacity:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= gone.nbytes

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0
