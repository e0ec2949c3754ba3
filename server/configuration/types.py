"""Types of settings beyond Python's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator


class FloatType(StrEnum):
    """Of the weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class KVType(StrEnum):
    """Of the keys and values."""

    AUTO = "auto"
    INT8 = "int8"
    INT4 = "int4"


class PoolingType(StrEnum):
    """Names of sentence-transformers."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST = "lasttoken"


class LoadTime(StrEnum):
    """When a model is loaded."""

    STARTUP = "startup"
    DEMAND = "demand"


class LogLevel(StrEnum):
    """Least severe messages that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How lines of the log are written."""

    AUTO = "auto"
    """Pretty on a terminal, JSON elsewhere."""
    PRETTY = "pretty"
    JSON = "json"


class MetricsAlias(StrEnum):
    """Whose names metrics have beside our own."""

    VLLM = "vllm"


def parse_size(text: str) -> int | None:
    """Bytes of a size as people write it; 0 for `off`, None for `auto`.

    Raises:
        ValueError: neither.
    """
    word = text.strip().lower()
    if word in ("off", "auto"):
        return 0 if word == "off" else None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", word)
    if match is None:
        raise ValueError(f"{text!r} is no size such as 8GB or 512MiB.")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def store_path(text: str) -> Path | None:
    """The file of a store; None where it is `memory` or `off`."""
    return None if text in ("memory", "off") else Path(text).expanduser()


def _size(text: str) -> str:
    parse_size(text)
    return text


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Size = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_size)]
"""A size in bytes as it was written: 8GB, 512MiB, a number, `off` or `auto`. `parse_size` reads it."""


@dataclass(frozen=True, slots=True)
class PathRule:
    """What a path must be. `~` is the home folder, since only a shell would have replaced it."""

    exists: bool
    folder: bool

    def __call__(self, path: Path) -> Path:
        path = path.expanduser()
        kind = "folder" if self.folder else "file"
        if self.exists and not path.exists():
            raise ValueError(f"The {kind} {str(path)!r} does not exist.")
        if path.exists() and path.is_dir() != self.folder:
            raise ValueError(f"{str(path)!r} is no {kind}.")
        return path


ExistingFile = Annotated[Path, AfterValidator(PathRule(exists=True, folder=False))]
ExistingFolder = Annotated[Path, AfterValidator(PathRule(exists=True, folder=True))]
File = Annotated[Path, AfterValidator(PathRule(exists=False, folder=False))]
"""Need not exist yet, as the next."""
Folder = Annotated[Path, AfterValidator(PathRule(exists=False, folder=True))]

ONE_ALONE = BeforeValidator(lambda value: (value,) if isinstance(value, str | Path) else value)
"""For a setting of several texts or paths: one may stand for itself."""

Several = Annotated[tuple[str, ...], ONE_ALONE]
