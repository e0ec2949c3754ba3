"""Pictures in every format, and a processor without a model that turns them into tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.media import ImageInput, PreparedMedia
from tests.fake_tokenizer import END, START


def gradient(height: int = 6, width: int = 9) -> np.ndarray:
    """uint8 `[height, width, 3]`, every pixel another colour."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 20, columns * 20, (rows + columns) * 10], axis=-1).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def data_uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(url: str, **more: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


def tokens_of(image: ImageInput) -> list[int]:
    """One token for each pixel, another one for each image."""
    height, width, _ = image.pixels.shape
    return [int(image.digest[:2], 16)] * (height * width)


class FakeProcessor:
    """ChatML over bytes, as `FakeTokenizer`, with images as `tokens_of` has them.

    Args:
        error: raised by `prepare`.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[list[dict[str, object]], tuple[ImageInput, ...]]] = []

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
        self.calls.append((messages, tuple(images)))
        if self.error is not None:
            raise self.error
        rest = list(images)
        ids: list[int] = []
        for message in messages:
            ids += [START, *f"{message['role']}\n".encode()]
            content = message["content"]
            for part in content if isinstance(content, list) else [text(str(content))]:
                ids += tokens_of(rest.pop(0)) if part["type"] == "image" else str(part["text"]).encode()
            ids += [END, *b"\n"]
        if rest:
            raise InvalidParameter("messages", "There are more images than places.")
        digests = tuple(image.digest for image in images)
        counts = tuple(len(tokens_of(image)) for image in images)
        return [*ids, START, *b"assistant\n"], PreparedMedia({"pixels": len(images)}, digests, counts)
