"""Which model folders mlx-vlm is to load, and loading them. Runs on the MLX thread."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.media import MediaProcessor
from chairlift.engine.models.vision import SeeingModel

log = logging.getLogger(__name__)

VISION_CONFIGS = ("vision_config", "vision_cfg", "vision_tower_config", "img_processor", "mm_vision_tower")
"""Fields of a configuration that describe a vision tower."""
VISION_PARTS = ("vision", "visual", "vit", "img_processor", "image")
"""Beginnings of a weight name's parts that belong to one."""


def needs_mlx_vlm(folder: Path) -> bool:
    """Whether a folder is mlx-vlm's to load: it knows the family, and either the folder holds a vision tower
    (some conversions keep the configuration of one and drop the weights) or mlx-lm does not know the family.
    """
    config = _config(folder)
    family = str(config.get("model_type", ""))
    if not family:
        return False
    sees = any(config.get(name) for name in VISION_CONFIGS) and has_vision_weights(folder)
    # mlx-lm is asked first: importing mlx-vlm takes seconds.
    return (sees or not _known("mlx_lm", family)) and _known("mlx_vlm", family)


def has_vision_weights(folder: Path) -> bool:
    """Whether any tensor of the folder belongs to a vision tower, by its name."""
    return any(part.startswith(VISION_PARTS) for name in _tensor_names(folder) for part in name.split("."))


def load_seeing_model(folder: Path) -> tuple[SeeingModel, dict[str, Any]]:
    """The model and its configuration. Weights are read when they are first evaluated.

    Raises:
        ModelUnavailable: a model that does not generate text token by token, or that brings code of its own.
        Exception: whatever mlx-vlm raises of files that it cannot read.
    """
    from mlx_vlm.utils import load_config, load_model

    config: dict[str, Any] = load_config(folder)
    if config.get("model_file"):
        raise ModelUnavailable("The folder brings code of its own (model_file), which is not run.")
    inner = load_model(folder, lazy=True)
    missing = [name for name in ("language_model", "get_input_embeddings") if not hasattr(inner, name)]
    if missing:
        raise ModelUnavailable(f"A model of type {config.get('model_type')} does not generate text.")
    return SeeingModel(inner), config


def load_images(folder: Path, model: Any, chat_template: str | None = None) -> MediaProcessor | None:
    """The folder's processor of images, or None where the model takes text only: it is not mlx-vlm's, has no
    vision tower, or its preprocessing cannot run here (said in the log)."""
    if not isinstance(model, SeeingModel) or not has_vision_weights(folder):
        return None
    from chairlift.engine.models.processor import load_processor

    try:
        return load_processor(folder, chat_template)
    except ModelUnavailable as error:
        log.warning("Served without images: %s", error)
        return None


def _known(package: str, family: str) -> bool:
    """Whether a package has a module for the family, under its own or the name that it is mapped to. A check
    of names only: importing a family may cost seconds."""
    if package == "mlx_vlm":
        from mlx_vlm.utils import MODEL_REMAPPING
    else:
        from mlx_lm.utils import MODEL_REMAPPING
    name = MODEL_REMAPPING.get(family.lower() if package == "mlx_vlm" else family, family)
    if not name.isidentifier():
        return False
    return importlib.util.find_spec(f"{package}.models.{name}") is not None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _tensor_names(folder: Path) -> Iterator[str]:
    """From the headers of the folder's safetensors files. A damaged one has no names: loading tells of it."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if 0 < size <= path.stat().st_size:
                    yield from json.loads(file.read(size))
        except (OSError, ValueError):
            continue
