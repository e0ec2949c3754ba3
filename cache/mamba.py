"""Recurrent states in a batch: the public names (the contract's part 1)."""

from __future__ import annotations

from chairlift.cache.mlx_lm_batching import LOCK, MENDS, make_batch_cache, merge_caches, to_batch_cache
from chairlift.cache.recurrent_batch import BatchMambaCache

__all__ = [
    "BatchMambaCache",
    "ensure_mamba_support",
    "make_batch_cache",
    "merge_caches",
    "patch_mlx_lm_for_mamba",
    "to_batch_cache",
    "undo_mlx_lm_for_mamba",
]


def patch_mlx_lm_for_mamba() -> bool:
    """Make mlx-lm's own `BatchGenerator` right for recurrent and hybrid models.

    Needed by mlx-lm 0.32.2 (all of `chairlift.cache.mlx_lm_batching.MENDS`, which gives the reasons).
    Each fault is probed for first, and left alone where upstream has mended it. Idempotent; any thread
    may call it.

    Returns:
        True where something is replaced, by this call or before it; False where upstream is right.
    """
    with LOCK:
        applied = [mend.apply() for mend in MENDS]
    return any(applied)


def ensure_mamba_support() -> None:
    """`patch_mlx_lm_for_mamba`, for callers who do not care whether it was needed."""
    patch_mlx_lm_for_mamba()


def undo_mlx_lm_for_mamba() -> None:
    """Put back everything that `patch_mlx_lm_for_mamba` replaced."""
    with LOCK:
        for mend in reversed(MENDS):
            mend.undo()
