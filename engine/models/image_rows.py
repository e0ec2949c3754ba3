"""What comes of encoding images, as the language model reads it, and how it is compared and cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

ROUNDING = 0.05
"""Of the largest feature: two encodings of one image that differ by less are one."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """One image as the language model sees it.

    Attributes:
        embeds: `[tokens, hidden]`.
        deep: added to the hidden states behind the first layers, `[tokens, hidden]` each (Qwen3-VL).
    """

    embeds: mx.array
    deep: tuple[mx.array, ...] = ()

    @property
    def nbytes(self) -> int:
        return int(self.embeds.nbytes) + sum(int(array.nbytes) for array in self.deep)

    def cut(self, first: int, last: int) -> ImageRows:
        """Its tokens `[first, last)`, as far as it has them."""
        return ImageRows(self.embeds[first:last], tuple(array[first:last] for array in self.deep))


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A prompt with images, of a family whose features are not by image: arrays by name, with one entry for
    each token of the prompt on axis 1."""

    arrays: Mapping[str, mx.array]

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays.values())


Encoded = ImageRows | PromptRows


def together(images: Sequence[ImageRows]) -> ImageRows:
    deep = zip(*(image.deep for image in images), strict=True)
    return ImageRows(
        mx.concatenate([image.embeds for image in images]), tuple(mx.concatenate(list(d)) for d in deep)
    )


def alike(one: ImageRows, other: ImageRows) -> bool:
    """Equal but for rounding, which other shapes of matrices bring."""
    return all(near(*pair) for pair in ((one.embeds, other.embeds), *zip(one.deep, other.deep, strict=True)))


def near(one: mx.array, other: mx.array) -> bool:
    if one.shape != other.shape:
        return False
    return bool((mx.abs(one - other).max() <= ROUNDING * mx.abs(one).max()).item())


def length(part: tuple[int, int]) -> int:
    return part[1] - part[0]
