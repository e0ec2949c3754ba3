"""The images of a request together: where from, how many, how much."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chairlift.engine.media import ImageInput
from chairlift.server.errors import APIError
from chairlift.server.media.images import ImageReader, ImageReference, digest
from chairlift.server.settings import MediaSettings
from tests.server.media.host import host, ok
from tests.server.media.pictures import data_uri, encoded, gradient

OPEN = MediaSettings(allow_private=True)
FIRST, SECOND = gradient(4, 5), gradient(7, 3)
PNG = encoded(FIRST)


def references(*urls: str) -> list[ImageReference]:
    return [ImageReference(url, "auto", f"messages[0].content[{at}]") for at, url in enumerate(urls)]


async def read(settings: MediaSettings, given: list[ImageReference]) -> tuple[ImageInput, ...]:
    reader = ImageReader(settings)
    return await reader.decode(given, await reader.read(given))


async def refusal(settings: MediaSettings, *urls: str) -> APIError:
    with pytest.raises(APIError) as caught:
        await read(settings, references(*urls))
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_image")
    assert error.param is not None and error.message.startswith(f"{error.param}: ")
    assert error.message.endswith(".")
    return error


async def test_from_everywhere_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(SECOND))
    async with host(lambda path: ok(PNG, "Content-Type: image/png")) as web:
        found = await read(
            replace(OPEN, local_folder=tmp_path),
            references(
                web.url(), data_uri(encoded(SECOND)), "a.png", f"file://{tmp_path}/a.png", data_uri(PNG)
            ),
        )
    for image, expected in zip(found, (FIRST, SECOND, SECOND, SECOND, FIRST), strict=True):
        np.testing.assert_array_equal(image.pixels, expected)
    assert [image.param for image in found] == [f"messages[0].content[{at}]" for at in range(5)]
    assert found[0].digest == found[4].digest != found[1].digest == found[2].digest == found[3].digest


async def test_the_type_that_a_host_states_is_checked() -> None:
    async with host(lambda path: ok(PNG, "Content-Type: image/jpeg")) as web:
        error = await refusal(OPEN, web.url())
    assert error.message == "messages[0].content[0]: the image is stated to be image/jpeg and is image/png."


async def test_a_page_in_place_of_an_image() -> None:
    async with host(lambda path: ok(b"<html>Please log in</html>", "Content-Type: text/html")) as web:
        assert "is no PNG, JPEG, WebP, GIF or BMP file" in (await refusal(OPEN, web.url())).message


@pytest.mark.parametrize(
    "url",
    ["", "cat.png", "/etc/passwd", "iVBORw0KGgo=", "ftp://cat.example/a", "javascript:1", "blob:x", "DATA"],
)
async def test_urls_of_no_use(url: str) -> None:
    assert "is at no URL of data:, http: or https:" in (await refusal(OPEN, url)).message


async def test_files_are_off_unless_a_folder_is_open(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    for url in (f"file://{tmp_path}/a.png", f"FILE:{tmp_path}/a.png"):
        assert "--allow-local-media" in (await refusal(OPEN, url)).message
    error = await refusal(replace(OPEN, local_folder=tmp_path), "/etc/passwd")
    assert "is no file below the folder" in error.message and str(tmp_path) not in error.message


async def test_private_addresses_are_off_by_default() -> None:
    async with host(lambda path: ok(PNG)) as web:
        error = await refusal(MediaSettings(), data_uri(PNG), web.url())
        assert error.param == "messages[0].content[1]" and "public address" in error.message
        assert web.connections == 0


async def test_a_scheme_in_capitals_and_spaces_around() -> None:
    [image] = await read(OPEN, references(f"  DATA{data_uri(PNG)[4:]} \n"))
    np.testing.assert_array_equal(image.pixels, FIRST)


async def test_as_many_as_allowed() -> None:
    assert len(await read(replace(OPEN, max_images=2), references(*[data_uri(PNG)] * 2))) == 2
    error = await refusal(replace(OPEN, max_images=2), *[data_uri(PNG)] * 3)
    assert error.param == "messages[0].content[2]" and "2 images at most" in error.message


async def test_as_many_bytes_as_allowed() -> None:
    size = len(PNG)
    assert (
        f"larger than {size - 1} bytes"
        in (await refusal(replace(OPEN, max_bytes=size - 1), data_uri(PNG))).message
    )
    both = replace(OPEN, max_bytes=size, max_total_bytes=2 * size)
    assert len(await read(both, references(*[data_uri(PNG)] * 2))) == 2
    error = await refusal(both, *[data_uri(PNG)] * 3)
    assert error.param == "messages[0].content[2]" and f"{2 * size} bytes at most" in error.message


async def test_as_many_pixels_as_allowed() -> None:
    both = replace(OPEN, max_pixels=45)
    assert len(await read(both, references(*[data_uri(PNG)] * 2))) == 2
    error = await refusal(both, *[data_uri(PNG)] * 3)
    assert error.param == "messages[0].content[2]" and "has 5 x 4 pixels" in error.message


async def test_detail_counts_the_pixels_of_the_file_and_makes_another_image() -> None:
    data = encoded(gradient(100, 1100))
    low = [replace(reference, detail="low") for reference in references(data_uri(data))]
    settings = replace(OPEN, max_pixels=110_000)
    [small], [large] = await read(settings, low), await read(settings, references(data_uri(data)))
    assert small.pixels.shape == (47, 512, 3) and small.detail == "low"
    assert small.digest != large.digest
    with pytest.raises(APIError, match="1100 x 100 pixels"):
        await read(replace(OPEN, max_pixels=109_999), low)


async def test_the_first_fault_is_told_whichever_is_found_first() -> None:
    async with host(lambda path: ok(b"no image")) as web:
        gone = web.url()
    error = await refusal(OPEN, data_uri(PNG), gone, "data:", "nowhere")
    assert error.param == "messages[0].content[1]" and "ConnectError" in error.message


async def test_the_event_loop_goes_on_meanwhile() -> None:
    """Decoding runs in threads: the loop turns many times while one large image is decoded."""
    data = encoded(
        np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8), compress_level=1
    )
    reading = asyncio.ensure_future(read(OPEN, references(data_uri(data))))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert reading.result()[0].pixels.shape == (1500, 1500, 3) and turns > 10


def test_digest() -> None:
    """Of every pixel and of the shape: images that begin alike differ (the field's caches once hashed the
    first thousand characters)."""
    same = gradient(40, 40)
    other = same.copy()
    other[39, 39, 2] ^= 1
    flat = same.reshape(20, 80, 3)
    assert digest(same) == digest(same.copy()) == hashlib.sha256(b"(40, 40, 3)" + same.tobytes()).hexdigest()
    assert len({digest(same), digest(other), digest(flat)}) == 3
    assert digest(same[:, ::-1]) == digest(np.ascontiguousarray(same[:, ::-1]))
