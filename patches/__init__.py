"""What upstream gets wrong or lacks, one file each, applied by an explicit call of the loader."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.patches.registry import MLX, MLX_LM, MLX_VLM, PATCHES, Outcome, Patch, apply_all, undo_all

__all__ = ["MLX", "MLX_LM", "MLX_VLM", "PATCHES", "Outcome", "Patch", "apply_patches", "undo_patches"]


def apply_patches(upstreams: Sequence[str] = (MLX, MLX_LM)) -> list[Outcome]:
    """Apply every patch of the given upstreams that the installed versions need. Idempotent."""
    return apply_all(PATCHES, upstreams)


def undo_patches() -> None:
    """Put every original back."""
    undo_all(PATCHES)
