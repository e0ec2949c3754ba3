"""A model's name on the disk changes with whatever may change its keys and values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from chairlift.engine.models import identity
from chairlift.engine.models.identity import model_identity


def folder(path: Path, changed: int | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    weights = {
        "a": np.arange(100_000, dtype=np.float32),
        "b": np.zeros((3, 3), dtype=np.float16),
        "none": np.zeros((0,), dtype=np.float16),
    }
    if changed is not None:
        weights["a"][changed] += 1
    save_file(weights, path / "model.safetensors")
    return path


def test_a_copy_has_the_same(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    (two / "tokenizer.json").write_text("{}")
    assert model_identity(one, "float32") == model_identity(two, "float32")
    assert len(bytes.fromhex(model_identity(one))) == 16


def test_it_changes_with_configuration_weights_code_and_circumstances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "one")
    circumstances = ((), ("a",), ("b", ""), ("", "b"))
    found = {model_identity(path, *each) for each in circumstances}
    for changed in (0, 12_500, 50_003, 99_999):
        found.add(model_identity(folder(tmp_path / f"changed-{changed}", changed)))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1}))
    found.add(model_identity(path))
    (path / "model.py").write_text("")
    found.add(model_identity(path))
    (path / "model.safetensors").rename(path / "weights.safetensors")
    found.add(model_identity(path))
    monkeypatch.setattr(identity, "_version", lambda package: "another")
    found.add(model_identity(path))
    assert len(found) == 4 + 4 + 4


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\2" + b"\0" * 7 + b"[]", b"\10" + b"\0" * 7 + b'{"a": 1}']
)
def test_what_is_no_safetensors_file_has_one_too(data: bytes, tmp_path: Path) -> None:
    path = folder(tmp_path / "one")
    (path / "more.safetensors").write_bytes(data)
    assert model_identity(path) != model_identity(folder(tmp_path / "two"))
