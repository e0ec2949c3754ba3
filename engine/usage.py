"""What the runner holds, and what MLX says of memory. On the MLX thread."""

from __future__ import annotations

import mlx.core as mx

from chairlift.engine.compiled import CompiledSteps
from chairlift.engine.memory.device import buffers_limit
from chairlift.engine.pages import PageStore
from chairlift.engine.plan import RunnerStats
from chairlift.engine.residents import Residents


class Usage:
    """Readings, one after the other.

    Args:
        weights: arrays of the model's.
    """

    def __init__(self, weights: int) -> None:
        self._weights = weights
        self._buffers_limit = buffers_limit()
        self._peak = 0

    def read(self, residents: Residents, pages: PageStore, compiled: CompiledSteps) -> RunnerStats:
        """As of now; MLX's own count of the most in use starts anew."""
        recent = mx.get_peak_memory()
        mx.reset_peak_memory()
        self._peak = max(self._peak, recent)
        return RunnerStats(
            rows=len(residents.rows),
            kv_bytes=residents.batch.nbytes + residents.own_nbytes,
            kv_tokens_bytes=residents.batch.held_nbytes + residents.own_nbytes,
            prefix_bytes=pages.nbytes,
            recent_prefix_bytes=pages.height,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            peak_bytes=self._peak,
            recent_peak_bytes=recent,
            buffers=self._weights + residents.buffers + pages.buffers,
            buffers_limit=self._buffers_limit,
            step_compilations=compiled.compilations,
            compiled_steps=compiled.computed,
        )
