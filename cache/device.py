"""Where arrays are computed."""

from __future__ import annotations

import mlx.core as mx


def on_cuda() -> bool:
    """Whether the default device is a CUDA device."""
    return bool(mx.default_device() != mx.cpu and mx.cuda.is_available())
