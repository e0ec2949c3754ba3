"""Images on their way to a model. Plain Python and numpy: may cross threads. No mlx, no HTTP.

A surface decodes and checks images (`ImageInput`); the model's `MediaProcessor` turns a conversation with
images into token ids and arrays (`PreparedMedia`), off the event loop; the runner encodes the arrays on the
MLX thread, chunked with prefill, and keeps encoded images by their digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One checked image."""

    pixels: np.ndarray
    """uint8 `[height, width, 3]`, RGB, upright."""
    digest: str
    """Hex SHA-256 over the pixels and their shape: equal digests are equal images."""
    detail: str = "auto"
    """OpenAI's `detail`: auto, low or high."""
    param: str = ""
    """Where it stood in the request, for errors: `messages[1].content[0]`."""


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """What a model needs beside the token ids of a prompt with images.

    Attributes:
        inputs: what the model's processor gives beside `input_ids` (`pixel_values`, `image_grid_thw`, …).
        digests: of the images, in the order of their tokens.
        tokens: how many positions in the prompt stand for each image; empty where that is not known.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    digests: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()


class MediaProcessor(Protocol):
    """A vision model's own preprocessing. Called off the event loop, from one thread at a time or several."""

    def prepare(
        self,
        messages: list[dict[str, object]],
        images: Sequence[ImageInput],
        *,
        tools: list[dict[str, object]] | None = None,
        documents: Sequence[dict[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> tuple[list[int], PreparedMedia]:
        """Token ids, image tokens expanded, and the arrays that go with them.

        Args:
            messages: the conversation; an image part is `{"type": "image"}`, in the order of `images`.

        Raises:
            InvalidParameter: the template refused the conversation, or an image cannot be used; `param` is
                the image's own.
        """
        ...
