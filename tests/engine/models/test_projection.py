"""What a model will need is what it does need, and nothing is read to know it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import ArraysCache, make_prompt_cache  # noqa: E402

from chairlift.engine.errors import ModelUnavailable  # noqa: E402
from chairlift.engine.memory.device import footprint  # noqa: E402
from chairlift.engine.models.build import make_runner  # noqa: E402
from chairlift.engine.models.loader import step_tokens  # noqa: E402
from chairlift.engine.models.projection import (  # noqa: E402
    PROCESS_GROWTH,
    Projection,
    process_bytes,
    project,
)
from chairlift.engine.models.sizes import measure_step  # noqa: E402
from tests.mlx.families import FAMILIES, build  # noqa: E402

TOKENS = 3
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "up": 1}, "unk_token": "<unk>"},
}
SLACK = 16 * 2**20
"""Bytes that a process may give back meanwhile."""


def folder_of(name: str, folder: Path, **other: int) -> Path:
    """A small model of a family, float32. Args: other: than the family's configuration has."""
    model = wider(name, **other)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {"model_type": name, **FAMILIES[name].config, "max_position_embeddings": 777, **other}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def wider(name: str, **other: int) -> Any:
    return build(replace(FAMILIES[name], config={**FAMILIES[name].config, **other}))


@pytest.mark.parametrize("name", ["llama", "mamba", "qwen3_next", "deepseek_v3", "gemma3_text"])
def test_the_numbers_are_the_models_own(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    model = build(FAMILIES[name])
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1] * TOKENS]), cache=caches))
    held = 0
    for cache in caches:
        arrays = [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]
        recurrent = isinstance(cache, ArraysCache)
        held += sum((array if recurrent else array[:, :, :TOKENS]).nbytes for array in arrays)
    found = project(folder, dtype="float32")
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert (found.weight_bytes, found.peak_bytes, found.context_length) == (weights, weights, 777)
    assert found.rows(1, TOKENS) == held > 0
    assert (found.row_bytes > 0) == (name in ("mamba", "qwen3_next"))
    assert (found.token_bytes > 0) == (name != "mamba")
    assert (found.windows != ()) == (name == "gemma3_text")


def test_by_hand(tmp_path: Path) -> None:
    config = FAMILIES["llama"].config
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    dimension = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    folder = folder_of("llama", tmp_path)
    full = project(folder, dtype="float32")
    assert full.token_bytes == 2 * layers * heads * dimension * 4
    half = project(folder, dtype="float16")
    assert half.token_bytes == full.token_bytes // 2 and half.weight_bytes == full.weight_bytes // 2
    assert half.peak_bytes == half.weight_bytes + full.weight_bytes
    assert full.rows(4, 10) == 40 * full.token_bytes


def test_no_weight_is_read(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = project(folder, dtype="float32")
    assert mx.get_peak_memory() - before < found.weight_bytes // 10


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_a_step_is_about_what_the_loader_measures(name: str, tmp_path: Path) -> None:
    width, vocab = {"intermediate_size": 1024}, FAMILIES[name].config["vocab_size"]
    found = project(folder_of(name, tmp_path, **width), dtype="float32")
    _, runner = make_runner(wider(name, **width), vocab)
    measured = measure_step(runner, vocab, step_tokens())
    assert found.vocab_size == vocab
    assert 0.4 < found.activation_bytes / measured < 2  # the smaller the model, the rougher


def test_the_process_is_what_this_one_takes_with_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    before = footprint()
    found = process_bytes(tmp_path)
    assert before - SLACK <= found - PROCESS_GROWTH <= footprint() + SLACK
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="tokenizer"):
        process_bytes(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be loaded"), ('{"model_type": "no_such_family"}', "no_such_family not supported")],
)
def test_what_cannot_be_read_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelUnavailable, match=message) as refused:
        project(folder)
    assert "\n" not in refused.value.message and str(tmp_path) not in refused.value.message


def test_rows() -> None:
    projection = Projection(1000, 2000, 10, ((4, 100), (9, 1000)), 7, 4096, 100, 0)
    assert projection.rows(3, 5) == 3 * (7 + 5 * 10 + 4 * 100 + 5 * 1000)
