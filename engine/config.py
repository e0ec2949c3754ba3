"""The engine's bounds, and what it tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.events import FinishReason, Usage
from chairlift.engine.memory.vocabulary import MemoryStats
from chairlift.engine.plan import RunnerStats
from chairlift.engine.prefix.vocabulary import DiskStats, PrefixStats
from chairlift.engine.request import Request
from chairlift.engine.row import RequestTiming


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of the engine.

    Raises:
        InvalidParameter: a bound that nothing could be served under.
    """

    max_num_seqs: int = 32
    """Rows at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step: decode rows count 1 each, the rest is prefill chunks. None: the model's own
    (`ModelInfo.step_tokens`), which suits the device."""
    max_step_ms: float | None = None
    """Milliseconds that a step may take while answers run: prompts are cut to fit. None: five times a step
    that only decodes."""
    max_waiting: int = 256
    """Requests in the wait queue, beyond those that find a free row."""
    memory_limit_bytes: int | None = None
    """Memory that the process may use, or of a GPU of its own what it may use of that. None: a share of what
    there is; 0: no bound."""
    prefix_cache_bytes: int | None = None
    """Memory for prefixes kept for later requests; 0 keeps none. None: a share of the device's memory."""
    prefix_cache_disk_bytes: int = 0
    """Of files for prefixes that memory has no room for, and that are to outlast the process: all models'
    below the folder together. 0 writes none."""
    prefix_cache_folder: Path | None = None
    """Where; None: below the user's cache folder."""
    close_timeout: float = 10.0
    """Seconds that `stop` waits for a step in flight and for the runner to close, before it gives the MLX
    thread up as wedged."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_step_ms", 1),
            ("max_waiting", 0),
            ("memory_limit_bytes", 0),
            ("prefix_cache_bytes", 0),
            ("prefix_cache_disk_bytes", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidParameter(name, f"{name} must be at least {least}, not {value}.")
        if self.prefix_cache_disk_bytes and self.prefix_cache_bytes == 0:
            raise InvalidParameter(
                "prefix_cache_disk_bytes", "prefix_cache_disk_bytes needs a prefix_cache_bytes above 0."
            )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands."""

    running: int
    """Rows that hold model state."""
    waiting: int
    steps: int
    """Calls of the runner that came back."""
    last_step_age_s: float | None
    """Since the last one came back; None before the first."""
    stalled_s: float
    """Since the step now on the MLX thread was handed over; 0 between steps. A wedge shows here."""
    busy: bool
    """There are rows, or states to release. An idle engine does no steps."""
    runner: RunnerStats
    prompt_tokens: int
    """Of all ended requests, as are the next two."""
    generation_tokens: int
    finished: Mapping[FinishReason, int]
    preemptions: int
    lost: int
    """Times that a row's state went down with a step and the row was started again."""
    wasted_tokens: int
    """Drawn by look-ahead for rows that had ended."""
    prefix: PrefixStats
    memory: MemoryStats = field(default_factory=MemoryStats)
    disk: DiskStats = field(default_factory=DiskStats)
    deferred: int = 0
    """Of those waiting, rows that wait for the disk rather than for a seat."""


class EngineObserver(Protocol):
    """Told about requests as they go, on the event loop. Must be quick; what it raises is logged."""

    def on_first_token(self, request: Request, timing: RequestTiming, cached_tokens: int) -> None:
        """`cached_tokens`: of the prompt, taken over from a kept prefix."""
        ...

    def on_token_interval(self, seconds: float) -> None:
        """Between two tokens of one request."""
        ...

    def on_finished(
        self, request: Request, timing: RequestTiming, usage: Usage, reason: FinishReason
    ) -> None: ...

    def on_step(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        """A step came back: tokens of prompts, and rows that drew one more, in the plan that it launched."""
        ...
