"""What is wrong with an image, in words for whoever sent it."""

from __future__ import annotations


class MediaError(Exception):
    """An image cannot be had or used. `message` completes "the image …" and names no place in the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
