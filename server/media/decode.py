"""From the bytes of a file to upright RGB pixels. Blocks; not for the event loop."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from chairlift.server.media.errors import MediaError

FORMATS = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-png": "image/png",
    "image/apng": "image/png",
    "image/x-ms-bmp": "image/bmp",
}
_UNTOLD = frozenset({"", "*/*", "image/*", "application/octet-stream", "binary/octet-stream"})
"""Types that say nothing of the content."""

LOW_DETAIL_EDGE = 512
"""Pixels of the longer edge under `detail: low`. Source: OpenAI's guide to images, which gives the model a
version of 512 by 512."""

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By Exif orientation (Exif 2.32, tag 274): what turns the stored picture upright."""


def decode(data: bytes, mime: str | None, *, detail: str, max_pixels: int) -> tuple[np.ndarray, int]:
    """Pixels, uint8 `[height, width, 3]`: RGB, upright, transparent places white, 16 bits scaled to 8; and
    how many the file held, which `detail` may have made fewer.

    Colour profiles are not applied. Of a JPEG that holds several pictures (MPO) the first one is taken.

    Args:
        mime: as stated with the data; None if it was not.
        max_pixels: checked against the file's own header, before anything is decoded.

    Raises:
        MediaError: no image, another one than stated, too many pixels, several frames, or damaged.
    """
    image = _open(data, max_pixels)
    kind = FORMATS["JPEG" if image.format == "MPO" else str(image.format)]
    stated = _stated(mime)
    if stated is not None and stated != kind:
        raise MediaError(f"is stated to be {stated} and is {kind}")
    if image.width * image.height > max_pixels:
        raise MediaError(
            f"has {image.width} x {image.height} pixels; at most {max_pixels} pixels are accepted in all"
        )
    try:
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise MediaError("is animated; only still images are supported")
        image.load()
        upright = _upright(_rgb(image), image)
    except MediaError:
        raise
    except Exception:  # Pillow's decoders raise whatever broken data makes them do
        raise MediaError("is damaged or cut short") from None
    if detail == "low":
        upright.thumbnail((LOW_DETAIL_EDGE, LOW_DETAIL_EDGE), Image.Resampling.LANCZOS)
    return np.array(upright, dtype=np.uint8), image.width * image.height


def _open(data: bytes, max_pixels: int) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaError(f"has far more pixels than the {max_pixels} that are accepted in all") from None
    except UnidentifiedImageError:
        raise MediaError("is no PNG, JPEG, WebP, GIF or BMP file") from None
    except Exception:
        raise MediaError("is damaged or cut short") from None


def _stated(mime: str | None) -> str | None:
    kind = (mime or "").partition(";")[0].strip().lower()
    return None if kind in _UNTOLD else _ALIASES.get(kind, kind)[:100]


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would cut off at 255
        deep = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((deep * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def _upright(image: Image.Image, original: Image.Image) -> Image.Image:
    try:
        orientation: Any = original.getexif().get(_ORIENTATION)
    except Exception:  # Exif data that cannot be read says nothing
        return image
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)
