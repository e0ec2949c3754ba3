"""One page or checkpoint as a file, which proves itself: whatever is not exactly right counts as not there.

The format is safetensors (huggingface/safetensors, README, "Format") with one tensor of bytes, `data`, and
in the metadata what it is and checksums of everything. A file is written under another name and renamed, so
that it is whole or not there for whoever is killed, and for other processes; nothing is synced, since a file
torn by a power cut does not pass the checks.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from chairlift.engine.prefix.vocabulary import Page, PageData

FORMAT = "chairlift-page-1"
"""Changes with the meaning of anything in the file."""
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
MAX_HEADER = 2**20
"""Bytes."""
PIECE = 2**20
"""Bytes read and hashed at once, so that other threads get their turn."""


class BadFile(ValueError):
    """No page, not the one asked for, or not as it was written."""


def write_page(path: Path, page: Page, data: PageData) -> int:
    """Put a page at `path` in one move; returns its bytes.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    header = _header(page, data)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(header), data.data):
                written = 0
                while written < part.nbytes:
                    written += file.write(part[written:])
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return len(header) + data.data.nbytes


def read_page(path: Path, page: Page) -> PageData:
    """The data of `page` from its file.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        BadFile: it is not what it should be.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(_exactly(file.read(8), 8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise BadFile("The length of the header is wrong.")
        told = _metadata(_exactly(file.read(length), length), size - 8 - length)
        if told != {**_described(page, told.get("shapes", "")), "checksum": told.get("checksum", "")}:
            raise BadFile("The file holds another page.")
        # Not a bytearray: it would be filled with zeros first, which takes as long as reading.
        view, got = np.empty(size - 8 - length, dtype=np.uint8).data, 0
        while got < view.nbytes:
            count = file.readinto(view[got : got + PIECE])
            if not count:
                raise BadFile("The file ends early.")
            got += count
    if told["checksum"] != _checksum(told, view):
        raise BadFile("The checksum is wrong.")
    return PageData(view, told["shapes"])


def _described(page: Page, shapes: str) -> dict[str, str]:
    return {
        "format": FORMAT,
        "digest": page.digest.hex(),
        "parent": page.parent.hex(),
        "start": str(page.start),
        "tokens": str(page.tokens),
        "shapes": shapes,
    }


def _header(page: Page, data: PageData) -> bytes:
    told = _described(page, data.shapes)
    told["checksum"] = _checksum(told, data.data)
    tensor = {"dtype": "U8", "shape": [data.data.nbytes], "data_offsets": [0, data.data.nbytes]}
    text = json.dumps({"__metadata__": told, "data": tensor}).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def _metadata(header: bytes, nbytes: int) -> dict[str, str]:
    try:
        read = json.loads(header)
        told, tensor = read["__metadata__"], read["data"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadFile("The header cannot be read.") from error
    if tensor != {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}:
        raise BadFile("The file has another length than it says.")
    if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
        raise BadFile("The metadata cannot be read.")
    return told


def _checksum(told: dict[str, str], data: memoryview) -> str:
    """Of the data and of what is told of it."""
    rest = {name: value for name, value in told.items() if name != "checksum"}
    total = xxhash.xxh3_128(json.dumps(rest, sort_keys=True).encode())
    for start in range(0, data.nbytes, PIECE):
        total.update(data[start : start + PIECE])
    return total.hexdigest()


def _exactly(data: bytes, count: int) -> bytes:
    if len(data) != count:
        raise BadFile("The file ends early.")
    return data
