"""Whether a model folder is whole, as far as its small files tell: what is missing is named before anything
is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift.engine.errors import ModelUnavailable

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer*", "vocab.*", "*.tiktoken", "*.model", "tekken.json")
"""Files of which tokenizers are made, one or the other."""


def check_folder(folder: Path) -> None:
    """Raises: ModelUnavailable: files are missing, or the configuration cannot be read; one line."""
    try:
        _check(folder)
    except OSError as error:
        raise ModelUnavailable(f"{error.filename or folder} cannot be read: {error.strerror}.") from None


def _check(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise ModelUnavailable(f"{folder} is no model folder: it has no {CONFIG}.")
    if not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(f"{folder} is no model folder that can be served: it has no safetensors file.")
    _read(folder / CONFIG)
    if (folder / INDEX).is_file():
        files = _read(folder / INDEX).get("weight_map")
        named = sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelUnavailable(f"{folder} is not whole: {missing[0]}{count} is missing.")


def has_tokenizer(folder: Path) -> bool:
    """Whether there is any file that a tokenizer could be made of."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZERS)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} holds no JSON object: it is damaged.")
    return content
