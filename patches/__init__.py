"""What upstream gets wrong or lacks, one file each, applied by an explicit call of the loader."""

from __future__ import annotations

from chairlift.patches.attention import apply_attention_seam
from chairlift.patches.gemma2 import patch_gemma2_mask
from chairlift.patches.plamo3 import patch_plamo3_window

__all__ = ["apply_patches"]


def apply_patches() -> None:
    """Apply every patch that the installed versions need. Idempotent."""
    apply_attention_seam()
    patch_gemma2_mask()
    patch_plamo3_window()
