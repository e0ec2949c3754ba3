"""An image from a folder that the operator opened to clients."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from chairlift.server.media.errors import MediaError
from chairlift.server.media.fetch import too_large

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening must not wait, as it would at a named pipe.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_local(url: str, folder: Path, limit: int) -> bytes:
    """A file below `folder`, by a `file:` URL or a path (absolute, or from the folder).

    Links are followed as long as they stay below the folder. What a path leads to is settled first and then
    opened step by step without following links, so a link put there in the meantime leads nowhere.

    Raises:
        MediaError: there is no such file below the folder, or it is larger than `limit` bytes. The message
            does not tell what lies outside.
    """
    missing = MediaError("is no file below the folder that images may come from")
    try:
        root = folder.resolve(strict=True)
        path = (root / _path_of(url)).resolve(strict=True)
        if not path.is_relative_to(root):
            raise missing
        return _read(root, path.relative_to(root).parts, limit)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle, in Python 3.12
        raise missing from None


def _path_of(url: str) -> str:
    if url[:5].lower() != "file:":
        return url
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError("a file URL of another host")
    return unquote(parts.path, errors="strict")


def _read(root: Path, steps: tuple[str, ...], limit: int) -> bytes:
    if not steps:
        raise ValueError("the folder itself")
    at = os.open(root, _DIRECTORY)
    try:
        for step in steps[:-1]:
            below = os.open(step, _DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        file = os.open(steps[-1], _FILE, dir_fd=at)
    finally:
        os.close(at)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("no regular file")
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise too_large(limit)
    return data
