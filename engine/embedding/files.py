"""The files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from chairlift.engine.errors import ModelUnavailable


def read_json(path: Path, kind: type) -> Any:
    """The JSON array or object in a file of a model folder.

    Raises:
        ModelUnavailable: it is missing, no JSON, or something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {type(error).__name__}.") from error
    if not isinstance(value, kind):
        raise ModelUnavailable(f"{path} is not what it should be: a JSON {kind.__name__}.")
    return value


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All arrays in the safetensors files of a folder.

    Raises:
        ModelUnavailable: there is none, or one cannot be read.
    """
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelUnavailable(f"{folder} is no model folder that can be served: it has no safetensors file.")
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded = mx.load(str(file))
        except Exception as error:  # mlx raises RuntimeError for whatever is wrong with a file
            raise ModelUnavailable(f"{file} cannot be read: {type(error).__name__}.") from error
        assert isinstance(loaded, dict)
        weights.update(loaded)
    return weights
