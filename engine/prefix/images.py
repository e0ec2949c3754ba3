"""What stands for the tokens of images in a chain: their content, so that another image is another prefix.

A prompt holds one and the same token wherever an image is. Keys and values of these tokens, and of all that
follow, depend on what is seen there. So in chains each of them is replaced by a number that no token has,
made of everything that tells the image from others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from chairlift.engine.media import PreparedMedia

HASH_BYTES = 32
TOKEN_BITS = 32
SMALL = 16
"""Numbers an image: inputs that hold no more (its size, its grid of patches) are part of its name."""


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt as its chain has it."""

    tokens: tuple[int, ...]
    ends: tuple[int, ...] = ()
    """Of its images: positions behind their last tokens, ascending."""

    def images_within(self, tokens: int) -> int:
        """Images that end within the first `tokens` tokens."""
        return sum(end <= tokens for end in self.ends)

    @property
    def seen_to(self) -> int:
        """Where its last image ends; 0 without any."""
        return self.ends[-1] if self.ends else 0


def name_images(
    prompt: tuple[int, ...], media: PreparedMedia, image_tokens: Collection[int]
) -> NamedPrompt | None:
    """The prompt with its images' tokens named by their content; None where it cannot be told which token
    belongs to which image.

    Args:
        image_tokens: that stand for images in prompts of the model.
    """
    wanted = frozenset(image_tokens)
    places = [at for at, token in enumerate(prompt) if token in wanted]
    counts = media.tokens or ((len(places),) if len(media.digests) == 1 else ())
    if not places or 0 in counts or len(counts) != len(media.digests) or sum(counts) != len(places):
        return None
    named, ends, start = list(prompt), [], 0
    for index, count in enumerate(counts):
        name = _name(media, index, count)
        for at in places[start : start + count]:
            named[at] = name | prompt[at]
        start += count
        ends.append(places[start - 1] + 1)
    return NamedPrompt(tuple(named), tuple(ends))


def _name(media: PreparedMedia, index: int, count: int) -> int:
    """A number of `chain.NAME_BYTES` bytes at most, above all tokens, with room for one below."""
    hashed = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (media.digests[index].encode(), str(count).encode(), *_sizes(media, index)):
        hashed.update(len(part).to_bytes(8, "little") + part)
    return (1 << 8 * HASH_BYTES | int.from_bytes(hashed.digest(), "little")) << TOKEN_BITS


def _sizes(media: PreparedMedia, index: int) -> Iterator[bytes]:
    """What small the model is told of an image beside its pixels."""
    for name in sorted(media.inputs):
        value = media.inputs[name]
        if not isinstance(value, np.ndarray) or not value.ndim or len(value) != len(media.digests):
            continue
        row = np.ascontiguousarray(value[index])
        if row.size <= SMALL:
            yield name.encode()
            yield str((row.dtype.str, row.shape)).encode()
            yield row.tobytes()
