"""What can be told of a model before it is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.weights import weight_bytes
from chairlift.engine.models.resolve import HUB_NAME, default_name, model_path, on_cpu

SENTENCE_TRANSFORMERS = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
"""Files of a folder that was made to embed texts."""
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "modernbert", "llama_bidirec"})
"""Values of `model_type` of families that generate nothing."""


@dataclass(frozen=True, slots=True)
class Described:
    """
    Attributes:
        name: that it is served under by default.
        embedding: it embeds texts or scores pairs; None: its files are not here.
        context_length: tokens; None likewise, or where the configuration does not say.
    """

    name: str
    embedding: bool | None
    context_length: int | None = None


def described(model: str | None, *, embedding: bool = False) -> Described:
    """Of a folder, a GGUF file, an `org/name` of the hub, or the embedded model (None). Fetches nothing.

    Args:
        embedding: it is asked for as an embedding model.

    Raises:
        ModelUnavailable: it is none of these.
    """
    name = default_name(model)
    if model is None:
        return Described(name, False)
    path = model_path(model)
    if path.is_dir():
        config = _config(path)
        return Described(name, embedding or is_embedding_folder(path), _context_length(config))
    if path.is_file() and not embedding:
        return Described(name, False)
    if HUB_NAME.fullmatch(model) and path.suffix != ".gguf" and not path.is_file():
        return Described(name, True if embedding else None)
    if embedding:
        raise ModelUnavailable(f"{model} is no embedding model: that is a folder, or org/name on the hub.")
    raise ModelUnavailable(
        f"There is no model folder or GGUF file {model}, and a name on the hub has the form org/name."
    )


def is_embedding_folder(folder: Path) -> bool:
    """It embeds texts, or scores pairs of them, rather than to generate."""
    if any((folder / name).is_file() for name in SENTENCE_TRANSFORMERS):
        return True
    config = _config(folder)
    architectures = config.get("architectures")
    names = [str(each) for each in architectures] if isinstance(architectures, list) else []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return True
    return config.get("model_type") in ENCODERS


def loading_bytes(folder: Path, dtype: str | None) -> int:
    """What loading a folder takes at most.

    Raises:
        ModelUnavailable: a file is no safetensors file.
    """
    wanted = dtype if dtype is not None else "float32" if on_cpu() else None
    try:
        return weight_bytes(folder, wanted).peak
    except ValueError as error:
        raise ModelUnavailable(f"{folder.name} cannot be loaded: {error}.") from error


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _context_length(config: dict[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        value = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    return None
