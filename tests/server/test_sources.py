"""Which models are found for what the operator asks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.budget import Budget, Kind, Reservation
from chairlift.engine.models import resolve
from chairlift.server.metrics import ServerMetrics
from chairlift.server.models.model import ModelSpec, Use
from chairlift.server.served import ModelOptions
from chairlift.server.sources import specs_of


def model_folder(path: Path, **config: object) -> str:
    """With one weight of 6 bytes in float16."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(6)
    (path / "model.safetensors").write_bytes(weights)
    return str(path)


def specs(*options: ModelOptions) -> list[ModelSpec]:
    return specs_of(options, ServerMetrics().model)


def test_the_use_of_a_folder_is_found(tmp_path: Path) -> None:
    folders = {
        "llama": model_folder(tmp_path / "llama", architectures=["LlamaForCausalLM"], model_type="llama"),
        "bert": model_folder(tmp_path / "bert", architectures=["BertModel"], model_type="bert"),
        "cross": model_folder(
            tmp_path / "cross", architectures=["XForSequenceClassification"], model_type="x"
        ),
        "qwen": model_folder(tmp_path / "qwen", architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
    }
    (tmp_path / "qwen" / "modules.json").write_text("[]")
    found = specs(*(ModelOptions(path) for path in folders.values()))
    assert {spec.name: spec.use for spec in found} == {
        "llama": Use.GENERATION,
        "bert": Use.EMBEDDING,
        "cross": Use.EMBEDDING,
        "qwen": Use.EMBEDDING,
    }
    for spec in found:
        assert spec.found is not None and spec.found.use is spec.use
        engine = spec.found.make(None, None)
        assert isinstance(engine, Engine if spec.use is Use.GENERATION else EmbeddingEngine)
        # Both keep to the budget of all.
        assert spec.found.make(budget := Budget(9), None)._budget is budget
    assert specs(ModelOptions(folders["llama"], use=Use.EMBEDDING))[0].use is Use.EMBEDDING


def test_a_load_is_told_what_memory_is_left_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[object]()

    def load_model(*_: object, memory: object, **__: object) -> None:
        told.append(memory)

    monkeypatch.setattr("chairlift.engine.models.loader.load_model", load_model)
    found = specs(ModelOptions(model_folder(tmp_path / "llama", model_type="llama")))[0].found
    assert found is not None
    budget = Budget(1000)
    weights = budget.reserve(300, Kind.WEIGHTS)
    assert isinstance(weights, Reservation)
    for each in (budget, None):
        engine = found.make(each, weights if each else None)
        assert isinstance(engine, Engine)
        engine._factory()
    assert told == [700, None]


def test_what_a_model_has_of_its_own(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "one", max_position_embeddings=4096)
    config = EngineConfig(max_num_seqs=1)
    (spec,) = specs(
        ModelOptions(
            folder,
            name="up",
            aliases=("gpt-4", "big"),
            dtype="float32",
            max_model_len=100,
            engine=config,
            pinned=True,
            idle_unload_s=5.0,
        )
    )
    assert (spec.name, spec.aliases, spec.pinned, spec.idle_unload_s) == ("up", ("gpt-4", "big"), True, 5.0)
    assert spec.context_length == 100
    assert spec.found is not None
    assert spec.found.size == 6 + 12  # what the file holds and what is made of it, side by side
    engine = spec.found.make(None, None)
    assert isinstance(engine, Engine) and engine.config == config


def test_one_on_demand_is_not_looked_for_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def from_hub(name: str, *, progress: bool) -> Path:
        asked.append(name)
        return Path(model_folder(tmp_path / "snapshot", model_type="bert"))

    monkeypatch.setattr(resolve, "_from_hub", from_hub)
    (spec,) = specs(ModelOptions("org/name", at_start=False))
    assert (spec.name, spec.use, spec.found, asked) == ("org/name", None, None, [])
    assert spec.find().use is Use.EMBEDDING and asked == ["org/name"]
    with pytest.raises(ModelUnavailable, match="There is no model folder"):
        specs(ModelOptions(str(tmp_path / "nowhere" / "at" / "all"), at_start=False))


def test_a_folder_that_was_deleted_meanwhile_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_from_hub", lambda name, progress: pytest.fail("it was looked for there"))
    (tmp_path / "some").mkdir()
    model_folder(tmp_path / "some" / "model")
    (spec,) = specs(ModelOptions("some/model"))
    assert spec.find().size == 6 + 12
    shutil.rmtree(tmp_path / "some")
    with pytest.raises(
        ModelUnavailable, match=r"The model's files are gone: some/model is no longer there\."
    ):
        spec.find()


def test_a_file_that_is_none_is_one_line_without_its_path(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ModelUnavailable, match="^one cannot be loaded: model.safetensors is no safetensors"):
        specs(ModelOptions(folder))


def test_an_embedding_model_is_a_folder_or_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    for name in (str(file), str(tmp_path / "nowhere" / "at" / "all")):
        with pytest.raises(ModelUnavailable, match="is no embedding model"):
            specs(ModelOptions(name, use=Use.EMBEDDING))
    folder = model_folder(tmp_path / "snapshot")
    monkeypatch.setattr(resolve, "_from_hub", lambda name, progress: Path(folder))
    (spec,) = specs(ModelOptions("org/name", use=Use.EMBEDDING))
    assert (spec.name, spec.use) == ("org/name", Use.EMBEDDING)
