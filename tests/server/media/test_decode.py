"""Pixels of files in every format, mode and state of health."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from chairlift.server.media.decode import decode
from chairlift.server.media.errors import MediaError
from tests.server.media.pictures import encoded, gradient

RGB = gradient()


def pixels(data: bytes, mime: str | None = None, *, detail: str = "auto", most: int = 10_000) -> np.ndarray:
    return decode(data, mime, detail=detail, max_pixels=most)[0]


def refusal(data: bytes, mime: str | None = None, *, most: int = 10_000) -> str:
    with pytest.raises(MediaError) as caught:
        decode(data, mime, detail="auto", max_pixels=most)
    return caught.value.message


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG written by hand: `rows` are its scan lines, each behind a byte 0."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("kind", "options", "mime"),
    [
        ("PNG", {}, "image/png"),
        ("BMP", {}, "image/bmp"),
        ("WEBP", {"lossless": True}, "image/webp"),
        ("GIF", {}, "image/gif"),
    ],
)
def test_formats_without_loss(kind: str, options: dict[str, object], mime: str) -> None:
    found = pixels(encoded(RGB, kind, **options), mime)
    assert found.dtype == np.uint8 and found.shape == (6, 9, 3)
    np.testing.assert_array_equal(found, RGB)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpeg(options: dict[str, object]) -> None:
    smooth = np.repeat(np.repeat(gradient(3, 3), 16, axis=0), 16, axis=1)
    found = pixels(encoded(smooth, "JPEG", quality=95, **options), "image/jpeg")
    assert np.abs(found.astype(int) - smooth).mean() < 4


@pytest.mark.parametrize(
    ("stated", "accepted"),
    [
        (None, True),
        ("", True),
        ("image/png", True),
        ("IMAGE/PNG; charset=binary", True),
        ("image/x-png", True),
        ("application/octet-stream", True),
        ("binary/octet-stream", True),
        ("image/*", True),
        ("image/jpeg", False),
        ("image/jpg", False),
        ("image/svg+xml", False),
        ("text/html", False),
        ("video/mp4", False),
    ],
)
def test_the_type_that_is_stated(stated: str | None, accepted: bool) -> None:
    if accepted:
        np.testing.assert_array_equal(pixels(encoded(RGB), stated), RGB)
    else:
        message = refusal(encoded(RGB), stated)
        assert message.startswith("is stated to be ") and message.endswith(" and is image/png")


def test_the_common_name_of_jpeg() -> None:
    assert pixels(encoded(RGB, "JPEG"), "image/jpg").shape == (6, 9, 3)


def test_gray_and_bilevel() -> None:
    gray = RGB[..., 0]
    np.testing.assert_array_equal(pixels(encoded(gray)), np.stack([gray] * 3, axis=-1))
    found = pixels(encoded(Image.fromarray(gray > 50)))
    np.testing.assert_array_equal(found[..., 1], np.where(gray > 50, 255, 0))


def test_sixteen_bits_are_scaled() -> None:
    deep = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    gray = pixels(encoded(Image.fromarray(deep)))
    np.testing.assert_array_equal(gray[0, :, 0], [0, 1, 128, 255])
    assert (gray[..., 0] == gray[..., 1]).all() and (gray[..., 0] == gray[..., 2]).all()
    colour = png(1, 1, 16, 2, b"\0" + struct.pack(">HHH", 0, 32768, 65535))
    np.testing.assert_array_equal(pixels(colour)[0, 0], [0, 128, 255])


def test_transparent_is_white() -> None:
    rgba = np.array([[[255, 0, 0, 255], [0, 0, 0, 0], [0, 0, 0, 128]]], dtype=np.uint8)
    found = pixels(encoded(Image.fromarray(rgba, "RGBA")))
    np.testing.assert_array_equal(found[0], [[255, 0, 0], [255, 255, 255], [127, 127, 127]])
    lossless = pixels(encoded(Image.fromarray(rgba, "RGBA"), "WEBP", lossless=True, exact=True))
    np.testing.assert_array_equal(lossless, found)
    gray = np.array([[[10, 255], [10, 0]]], dtype=np.uint8)
    found = pixels(encoded(Image.fromarray(gray, "LA")))
    np.testing.assert_array_equal(found[0], [[10, 10, 10], [255, 255, 255]])


def test_palettes() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for at in range(3):
        image.putpixel((at, 0), at)
    np.testing.assert_array_equal(pixels(encoded(image))[0], [[255, 0, 0], [0, 255, 0], [0, 0, 255]])
    np.testing.assert_array_equal(
        pixels(encoded(image, transparency=1))[0], [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    )
    np.testing.assert_array_equal(
        pixels(encoded(image, transparency=bytes([255, 0, 128])))[0],
        [[255, 0, 0], [255, 255, 255], [127, 127, 255]],
    )
    np.testing.assert_array_equal(
        pixels(encoded(image, "GIF", transparency=2))[0], [[255, 0, 0], [0, 255, 0], [255, 255, 255]]
    )


def test_one_colour_that_stands_for_transparent() -> None:
    data = encoded(Image.fromarray(RGB), transparency=tuple(int(value) for value in RGB[2, 3]))
    expected = RGB.copy()
    expected[2, 3] = 255
    np.testing.assert_array_equal(pixels(data), expected)


def test_cmyk() -> None:
    inks = np.zeros((16, 48, 4), dtype=np.uint8)
    inks[:, :16, 0] = 255  # cyan
    inks[:, 16:32, 3] = 255  # black
    found = pixels(encoded(Image.fromarray(inks, "CMYK"), "JPEG", quality=100)).astype(int)
    for at, colour in ((8, (0, 255, 255)), (24, (0, 0, 0)), (40, (255, 255, 255))):
        assert np.abs(found[8, at] - colour).max() < 6


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (1, lambda upright: upright),
        (2, lambda upright: upright[:, ::-1]),
        (3, lambda upright: upright[::-1, ::-1]),
        (4, lambda upright: upright[::-1]),
        (5, lambda upright: upright.transpose(1, 0, 2)),
        (6, lambda upright: np.rot90(upright, 1)),
        (7, lambda upright: upright[::-1, ::-1].transpose(1, 0, 2)),
        (8, lambda upright: np.rot90(upright, -1)),
        (9, lambda upright: upright),
        (0, lambda upright: upright),
    ],
)
def test_orientation(kind: str, orientation: int, turn: Callable[[np.ndarray], np.ndarray]) -> None:
    """A camera stores the picture turned and says so; row 0 and column 0 are where Exif 2.32 has them."""
    upright = np.repeat(np.repeat(gradient(2, 3), 16, axis=0), 16, axis=1)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = {"quality": 95} if kind == "JPEG" else {}
    if kind == "WEBP":
        options["lossless"] = True
    found = pixels(encoded(np.ascontiguousarray(turn(upright)), kind, exif=exif.tobytes(), **options))
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).mean() < 4


def test_exif_that_cannot_be_read() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0"):
        np.testing.assert_array_equal(pixels(encoded(RGB, exif=exif)), RGB)


def test_a_gray_picture_on_its_side() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = np.array([[0, 65535]], dtype=np.uint16)
    found = pixels(encoded(Image.fromarray(deep), exif=exif.tobytes()))
    np.testing.assert_array_equal(found[..., 0], [[0], [255]])


def frames(count: int) -> list[Image.Image]:
    return [Image.fromarray(np.roll(RGB, at, axis=0)) for at in range(count)]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animated_is_refused_by_name(kind: str) -> None:
    first, *others = frames(3)
    data = encoded(first, kind, save_all=True, append_images=others)
    assert refusal(data) == "is animated; only still images are supported"


def test_the_first_of_several_pictures_of_a_camera() -> None:
    first, second = frames(2)
    data = encoded(first, "MPO", save_all=True, append_images=[second], quality=95)
    assert (
        np.abs(pixels(data, "image/jpeg").astype(int) - pixels(encoded(first, "JPEG", quality=95))).max() < 3
    )


def test_too_many_pixels_by_the_header_alone() -> None:
    """Nothing is decoded: there is nothing to decode."""
    assert refusal(png(200, 51, 8, 2, b"")) == (
        "has 200 x 51 pixels; at most 10000 pixels are accepted in all"
    )
    for width, height in ((9_000, 10_000), (20_000, 20_000), (2**31 - 1, 2**31 - 1)):
        assert "pixels" in refusal(png(width, height, 8, 2, b"")), (width, height)
    assert decode(encoded(gradient(100, 100)), None, detail="auto", max_pixels=10_000)[1] == 10_000


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_cut_short(kind: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = encoded(noise, kind)
    message = refusal(data[: int(len(data) * share)])
    assert message in ("is damaged or cut short", "is no PNG, JPEG, WebP, GIF or BMP file")


def test_damaged() -> None:
    data = bytearray(encoded(RGB))
    at = data.index(b"IDAT") + 6
    data[at : at + 8] = b"\xff" * 8
    assert refusal(bytes(data)) == "is damaged or cut short"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<html></html>",
        b"%PDF-1.7",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        encoded(RGB, "TIFF"),
        encoded(RGB, "PPM"),
        encoded(RGB, "ICO"),
    ],
)
def test_no_image(data: bytes) -> None:
    assert refusal(data) in ("is no PNG, JPEG, WebP, GIF or BMP file", "is damaged or cut short")


def test_detail() -> None:
    wide = gradient(100, 1100)
    assert pixels(encoded(wide), most=200_000).shape == (100, 1100, 3)
    assert pixels(encoded(wide), detail="high", most=200_000).shape == (100, 1100, 3)
    small, count = decode(encoded(wide), None, detail="low", max_pixels=200_000)
    assert small.shape == (47, 512, 3) and count == 110_000
    np.testing.assert_array_equal(pixels(encoded(RGB), detail="low"), RGB)
