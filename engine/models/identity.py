"""A name for everything that makes a model's keys and values what they are, for what outlasts the process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from chairlift.engine.prefix.files import FORMAT

PACKAGES = ("chairlift", "mlx", "mlx-lm", "mlx-vlm")
IMAGE_PACKAGES = ("transformers", "pillow", "numpy")
"""That make of an image what the model sees of it."""
FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
"""What keys and values follow from, the last two where the model takes images."""
SAMPLES = 8
"""Places of every tensor of which the content is read."""
SAMPLE_BYTES = 256


def model_identity(folder: Path, *circumstances: str) -> str:
    """Changes with the configuration, the weights, the code that runs them, and the circumstances. Reading
    all weights would take as long as loading them: of each tensor some places are read.

    Args:
        folder: config.json and safetensors files.
        circumstances: whatever else the values depend on, such as number formats and the device.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(folder, circumstances):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(folder: Path, circumstances: Iterable[str]) -> Iterator[bytes]:
    yield FORMAT.encode()
    yield from (named.encode() for named in versions(PACKAGES))
    for circumstance in circumstances:
        yield circumstance.encode()
    # A configuration may name code of its own, in files beside it.
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.py"))):
        if path.name in FILES or path.suffix == ".py":
            yield path.name.encode()
            yield path.read_bytes()
    for path in sorted(folder.glob("*.safetensors")):
        yield path.name.encode()
        yield from _samples(path)


def versions(packages: Iterable[str]) -> list[str]:
    """Each with the version that is installed."""
    return [f"{package} {_version(package)}" for package in packages]


def _samples(path: Path) -> Iterator[bytes]:
    """The size and the header of a file of weights, and some of every tensor."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        yield str(size).encode()
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
        yield header
        for start, stop in _offsets(header, size - 8 - length):
            for place in range(SAMPLES):
                at = start + (stop - start) * place // SAMPLES
                file.seek(8 + length + at)
                yield file.read(min(SAMPLE_BYTES, stop - at))
            file.seek(8 + length + max(start, stop - SAMPLE_BYTES))
            yield file.read(min(SAMPLE_BYTES, stop - start))


def _offsets(header: bytes, size: int) -> list[tuple[int, int]]:
    """Of the tensors within `size` bytes; none of a file that is no safetensors file."""
    try:
        tensors = json.loads(header)
        spans = [tuple(tensor["data_offsets"]) for name, tensor in tensors.items() if name != "__metadata__"]
        return sorted((start, stop) for start, stop in spans if 0 <= start <= stop <= size)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
