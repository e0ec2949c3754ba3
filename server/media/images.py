"""The images of a request: where each comes from, and what may come at all."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from chairlift.engine.media import ImageInput
from chairlift.server.errors import APIError, invalid
from chairlift.server.media.budget import MediaBudget
from chairlift.server.media.data_uri import read_data_uri
from chairlift.server.media.decode import decode
from chairlift.server.media.errors import MediaError
from chairlift.server.media.fetch import Fetcher
from chairlift.server.media.local import read_local
from chairlift.server.settings import MediaSettings

DECODERS = 4
"""Requests whose images are decoded and prepared at a time: with the bound on pixels, a bound on memory."""

Files = list[tuple[bytes, str | None]]
"""Contents and stated types."""


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image as a request names it."""

    url: str
    detail: str
    param: str
    """Its place: `messages[1].content[0]`."""


class ImageReader:
    """Reads and decodes images off the event loop; one for the life of an app.

    `turn` is for whoever decodes, until the pixels are gone again; fetching is done before, since it may take
    long.
    """

    def __init__(self, settings: MediaSettings, fetcher: Fetcher | None = None) -> None:
        self._settings = settings
        self._fetcher = fetcher or Fetcher(settings)
        self._threads = ThreadPoolExecutor(DECODERS, "chairlift-images")
        self.turn = asyncio.Semaphore(DECODERS)
        self.budget = MediaBudget(settings.max_prepared_bytes)

    async def read(self, references: Sequence[ImageReference]) -> Files:
        """The images' files, in order.

        Raises:
            APIError: 400, of the first image at fault, by its place.
        """
        self._check_count(references)
        # All of them to the end, so that the same request is always told of the same fault.
        results = await asyncio.gather(*map(self._bytes, references), return_exceptions=True)
        total = 0
        files: Files = []
        for reference, result in zip(references, results, strict=True):
            if isinstance(result, MediaError):
                raise _refused(reference.param, f"the image {result.message}")
            if isinstance(result, BaseException):
                raise result
            total += len(result[0])
            if total > self._settings.max_total_bytes:
                raise _refused(
                    reference.param,
                    f"the images of a request may hold {self._settings.max_total_bytes} bytes at most",
                )
            files.append(result)
        return files

    def check(self, references: Sequence[ImageReference]) -> None:
        """What `read` would refuse without looking any further than the request. Raises: APIError: 400."""
        self._check_count(references)
        for reference in references:
            try:
                if self._scheme(reference) == "data":
                    read_data_uri(reference.url.strip(), self._settings.max_bytes)
            except MediaError as error:
                raise _refused(reference.param, f"the image {error.message}") from None

    def _check_count(self, references: Sequence[ImageReference]) -> None:
        if len(references) > self._settings.max_images:
            where = references[self._settings.max_images].param
            raise _refused(where, f"a request may hold {self._settings.max_images} images at most")

    async def decode(self, references: Sequence[ImageReference], files: Files) -> tuple[ImageInput, ...]:
        """The images in files that were read, in order.

        Raises:
            APIError: 400, of the first image at fault, by its place.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, references, files)

    async def _bytes(self, reference: ImageReference) -> tuple[bytes, str | None]:
        """Content and stated type. Raises: MediaError."""
        url, settings = reference.url.strip(), self._settings
        scheme = self._scheme(reference)
        loop = asyncio.get_running_loop()
        if scheme == "data":
            return await loop.run_in_executor(self._threads, read_data_uri, url, settings.max_bytes)
        if scheme in ("http", "https"):
            fetched = await self._fetcher.fetch(url)
            return fetched.data, fetched.mime
        assert settings.local_folder is not None
        data = await loop.run_in_executor(
            self._threads, read_local, url, settings.local_folder, settings.max_bytes
        )
        return data, None

    def _scheme(self, reference: ImageReference) -> str:
        """data, http, https, or, where there is a folder of local media, file or "". Raises: MediaError."""
        start = reference.url.strip()[:12]
        scheme = start.partition(":")[0].lower() if ":" in start else ""
        if scheme in ("data", "http", "https"):
            return scheme
        if self._settings.local_folder is not None and scheme in ("", "file"):
            return scheme
        if scheme == "file":
            raise MediaError("is a local file; the operator may open a folder with --allow-local-media")
        raise MediaError("is at no URL of data:, http: or https:")

    def _decode(self, references: Sequence[ImageReference], files: Files) -> tuple[ImageInput, ...]:
        room = self._settings.max_pixels
        images: list[ImageInput] = []
        for reference, (data, mime) in zip(references, files, strict=True):
            try:
                pixels, count = decode(data, mime, detail=reference.detail, max_pixels=room)
            except MediaError as error:
                raise _refused(reference.param, f"the image {error.message}") from None
            room -= count
            images.append(ImageInput(pixels, digest(pixels), reference.detail, reference.param))
        return tuple(images)


def digest(pixels: np.ndarray) -> str:
    """Hex SHA-256 over shape and pixels: what two images that look the same to a model have in common."""
    hashed = hashlib.sha256(repr(pixels.shape).encode())
    hashed.update(np.ascontiguousarray(pixels).data)
    return hashed.hexdigest()


def _refused(where: str, message: str) -> APIError:
    return invalid(f"{where}: {message}.", where, "invalid_image")
