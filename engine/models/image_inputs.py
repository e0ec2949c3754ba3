"""A processor's arrays: for which tokens they stand, image by image, as mlx arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

TOKEN_NAMES = (
    "image_token_index",
    "image_token_id",
    "media_placeholder_token_id",
    "img_context_token_id",
)
"""Names that configurations give to the token an image's features replace."""
GRIDS = ("image_grid_thw", "image_grid_hws", "grid_thws")
"""Inputs that say how many patches of `pixel_values` each image has, as factors."""
TILED = frozenset({"pixel_values", "pixel_attention_mask"})
"""Inputs of families that cut an image into tiles of one size."""
PIXELS = "pixel_values"
NOT_INPUTS = frozenset({"input_ids", "attention_mask", "mask", PIXELS})


def image_token_ids(config: Any) -> list[int]:
    """The tokens that stand for images in prompts of a model."""
    found = [getattr(config, name, None) for name in TOKEN_NAMES]
    return sorted({int(token) for token in found if isinstance(token, int)})


def split_inputs(inputs: Mapping[str, Any], tokens: Sequence[int]) -> list[dict[str, Any]] | None:
    """A processor's arrays image by image, or None where they cannot be told apart.

    Args:
        inputs: of a whole prompt.
        tokens: that stand for each image.
    """
    arrays = {name: value for name, value in inputs.items() if name not in NOT_INPUTS - {PIXELS}}
    count, pixels = len(tokens), arrays.get(PIXELS)
    if pixels is None:
        return None
    for name in GRIDS:
        if name in arrays:
            return _by_grid(arrays, name, count)
    if all(isinstance(value, np.ndarray | list) and len(value) == count for value in arrays.values()):
        return [{name: value[index : index + 1] for name, value in arrays.items()} for index in range(count)]
    return _by_tiles(arrays, tokens)


def _by_grid(arrays: dict[str, Any], name: str, count: int) -> list[dict[str, Any]] | None:
    """Patches in rows, as many to an image as its grid says."""
    pixels, grid = arrays[PIXELS], np.asarray(arrays[name])
    ends = [int(end) for end in np.cumsum(np.prod(grid, axis=1))]
    if len(grid) != count or len(pixels) != ends[-1] or set(arrays) != {PIXELS, name}:
        return None
    return [
        {PIXELS: pixels[start:end], name: grid[index : index + 1]}
        for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]


def _by_tiles(arrays: dict[str, Any], tokens: Sequence[int]) -> list[dict[str, Any]] | None:
    """Tiles of one size, so of as many tokens each; perhaps behind a batch axis of 1."""
    if not set(arrays) <= TILED or not all(isinstance(value, np.ndarray) for value in arrays.values()):
        return None
    axis = 1 if arrays[PIXELS].ndim == 5 else 0
    tiles = arrays[PIXELS].shape[axis]
    each, rest = divmod(sum(tokens), tiles) if tiles else (0, 1)
    alike = all(value.ndim > axis and value.shape[axis] == tiles for value in arrays.values())
    if rest or not each or not alike or any(count % each for count in tokens):
        return None
    ends = [int(end) // each for end in np.cumsum(tokens)]
    cuts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [{name: value[:, cut] if axis else value[cut] for name, value in arrays.items()} for cut in cuts]


def as_mlx(value: Any) -> Any:
    """numpy arrays, also in lists, as mlx arrays; anything else as it is."""
    if isinstance(value, np.ndarray):
        return mx.array(value.astype(np.float32) if value.dtype == np.float64 else value)
    if isinstance(value, list):
        return [as_mlx(part) for part in value]
    return value
