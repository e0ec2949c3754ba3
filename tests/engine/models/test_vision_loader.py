"""Which folders go to mlx-vlm, and models of it served with and without their images."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.loader import load_model
from chairlift.engine.models.vision_loader import has_vision_weights, needs_mlx_vlm
from chairlift.patches import undo_patches
from tests.engine.models.vision_folders import write_folder, write_tokenizer
from tests.mlx.lift import Lift, Ride
from tests.mlx.vision_families import FAMILIES, build, text_prompt
from tests.mlx.vision_parity import solo

LANGUAGE = "language_model.model.embed_tokens.weight"
TOWER = "vision_tower.blocks.0.attn.qkv.weight"


def write(folder: Path, config: Mapping[str, Any], *tensors: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in tensors})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    return folder


@pytest.fixture
def unpatched() -> Iterator[None]:
    yield
    undo_patches()


@pytest.mark.parametrize(
    ("config", "tensors", "theirs"),
    [
        ({"model_type": "qwen3_5", "vision_config": {"depth": 1}}, (LANGUAGE, TOWER), True),
        ({"model_type": "qwen3_5", "vision_config": {"depth": 1}}, (LANGUAGE,), False),
        ({"model_type": "qwen3_5"}, (LANGUAGE, TOWER), False),
        ({"model_type": "llama"}, (LANGUAGE,), False),
        ({"model_type": "aya_vision"}, (LANGUAGE,), True),
        ({"model_type": "llava_qwen2", "mm_vision_tower": "x"}, (LANGUAGE, TOWER), True),
        ({"model_type": "nobody_knows", "vision_config": {"depth": 1}}, (LANGUAGE, TOWER), False),
        ({"model_type": "os.path"}, (LANGUAGE,), False),
        ({}, (LANGUAGE, TOWER), False),
    ],
)
def test_whose_a_folder_is(
    tmp_path: Path, config: dict[str, Any], tensors: tuple[str, ...], theirs: bool
) -> None:
    assert needs_mlx_vlm(write(tmp_path, config, *tensors)) is theirs


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4, struct.pack("<Q", 2**40), struct.pack("<Q", 3) + b"{x}"]
)
def test_damaged_weights_show_no_tower(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {"model_type": "qwen3_5", "vision_config": {"depth": 1}})
    (tmp_path / "model.safetensors").write_bytes(content)
    assert not has_vision_weights(tmp_path)


def write_model(folder: Path, family: str, *, tower: bool = True) -> Path:
    """Random weights and the configuration, as mlx-vlm saves them."""
    config = copy.deepcopy({**FAMILIES[family].config, "model_type": family})
    for name in ("image_token_index", "video_token_index", "media_placeholder_token_id"):
        del config[name]
    weights = dict(tree_flatten(build(FAMILIES[family]).parameters()))
    kept = {name: array for name, array in weights.items() if tower or "vision_tower" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("tower", "sees"), [(True, True), (False, False)])
def test_a_model_with_and_without_its_tower(tmp_path: Path, tower: bool, sees: bool, unpatched: None) -> None:
    folder = write_model(write_folder(tmp_path, "qwen2_vl"), "qwen2_vl", tower=tower)
    loaded = load_model(folder, "small")
    assert (loaded.info.vision, loaded.processor is not None) == (sees, sees)
    assert (loaded.info.architecture, loaded.info.batching) == ("qwen2_vl", "flat")
    assert loaded.info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    ride = Ride(text_prompt(11), tokens=8)
    (answer,) = Lift(loaded.runner).run([ride])
    assert tuple(sample.token for sample in answer) == solo("qwen2_vl").answer(ride.prompt, 8).tokens[:8]


def test_without_a_processor_it_answers_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unpatched: None
) -> None:
    write_tokenizer(tmp_path, ("<|image_pad|>",))
    loaded = load_model(write_model(tmp_path, "llava"), "small")
    assert (loaded.info.vision, loaded.processor) == (False, None)
    assert "Served without images" in caplog.text


def test_code_of_a_folder_is_not_run(tmp_path: Path, unpatched: None) -> None:
    write_folder(tmp_path, "qwen2_vl")
    write_model(tmp_path, "qwen2_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    (tmp_path / "model.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelUnavailable, match="code of its own"):
        load_model(tmp_path, "small")
