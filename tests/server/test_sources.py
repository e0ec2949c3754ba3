"""Which models are found for what the operator asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models import resolve
from chairlift.server.served import ServeOptions
from chairlift.server.sources import find_models


def model_folder(path: Path) -> str:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return str(path)


def test_beside_and_alone(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    source, embedding = find_models(ServeOptions(model=one, embedding_model=two))
    assert source is not None and embedding is not None
    assert (source.served_name, embedding.served_name) == ("one", "two")
    source, embedding = find_models(ServeOptions(embedding_model=two, served_embedding_name="vectors"))
    assert source is None and embedding is not None
    assert (embedding.folder, embedding.served_name) == (tmp_path / "two", "vectors")
    source, embedding = find_models(ServeOptions(model=one))
    assert source is not None and embedding is None


def test_two_models_have_two_names(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "one")
    with pytest.raises(ModelUnavailable, match="--served-embedding-name"):
        find_models(ServeOptions(model=one, embedding_model=one))
    find_models(ServeOptions(model=one, embedding_model=one, served_embedding_name="two"))


def test_an_embedding_model_is_a_folder_or_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    for name in (str(file), str(tmp_path / "nowhere" / "at" / "all")):
        with pytest.raises(ModelUnavailable, match="is no embedding model"):
            find_models(ServeOptions(embedding_model=name))
    folder = model_folder(tmp_path / "snapshot")
    monkeypatch.setattr(resolve, "_from_hub", lambda name, progress: Path(folder))
    _, embedding = find_models(ServeOptions(embedding_model="org/name"))
    assert embedding == resolve.ModelSource(Path(folder), "org/name")
