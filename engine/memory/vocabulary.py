"""What is said of memory between the engine, the device and those who watch. All plain Python values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Device(Protocol):
    """The seam to the device's memory (`chairlift.engine.memory.device`)."""

    def usable(self) -> int:
        """Bytes that the process may use; 0: not known."""
        ...

    @property
    def shared(self) -> bool:
        """The process's own memory counts too."""
        ...

    def bound(self, total: int, cache: int) -> None:
        """Hold MLX to so many bytes in use, and of freed buffers kept. On the MLX thread."""
        ...

    def tidy(self) -> None:
        """Give back to the system what nobody uses."""
        ...

    def footprint(self) -> int:
        """Bytes of the process; 0: not known."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """
    Attributes:
        limit: bytes that the process may use; 0: no bound.
        process: what the process needs beside its models, as is all below in bytes.
        weights: of all models.
        headroom: for what steps compute.
        rows: of this engine's rows, as projected.
        prefix: of this engine's kept pages.
        footprint: of the whole process, as last measured.
        preemptions: times that a row gave its state up for want of memory.
        waits: rows that had a seat and no memory, each time counted once.
        settled: steps that waited for the one before to be computed.
        reactions: times that more was in use than was projected, and something was done about it.
    """

    limit: int = 0
    process: int = 0
    weights: int = 0
    headroom: int = 0
    rows: int = 0
    prefix: int = 0
    footprint: int = 0
    preemptions: int = 0
    waits: int = 0
    settled: int = 0
    reactions: int = 0
