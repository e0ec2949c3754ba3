"""Every family with random weights: in a batch as alone, and as the formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_embeddings")

import mlx.core as mx
import mlx.nn as nn

from chairlift.engine.embedding.families import FAMILIES, make_layers
from chairlift.engine.embedding.loader import load_embedder
from chairlift.engine.embedding.types import Task, TokenizedText
from chairlift.engine.embedding.vectors import normalised
from tests.engine.embedding import folders
from tests.engine.embedding.folders import BERT, GEMMA, LLAMA, MODERNBERT, QWEN3, ROBERTA, VOCAB
from tests.engine.embedding.reference import Array, gelu, hidden_states, layer_norm, linear, unit

CONFIGS = {config["model_type"]: config for config in (BERT, ROBERTA, MODERNBERT, QWEN3, GEMMA, LLAMA)}
CONFIGS["roberta"] = {**ROBERTA, "model_type": "roberta"}
LENGTHS = (1, 40, 7, 23, 40, 2, 12)


def texts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[TokenizedText]:
    """Without the token that RoBERTa takes for padding: its places in the text are counted past it."""
    generator = np.random.default_rng(seed)
    return [TokenizedText(tuple(map(int, generator.integers(4, VOCAB, length)))) for length in lengths]


def pairs(types: bool) -> list[TokenizedText]:
    return [
        TokenizedText(text.token_ids, tuple(int(types and place > 3) for place in range(len(text))))
        for text in texts(1, (9, 30, 12, 5))
    ]


def float64(weights: dict[str, mx.array]) -> dict[str, Array]:
    return {name: np.array(array).astype(np.float64) for name, array in weights.items()}


def test_every_family_is_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_padded_batch_equals_solo_runs(family: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    folder = folders.write(tmp_path / "m", config, folders.random_weights(config))
    model = load_embedder(folder, "m", dtype="float32")
    assert model.info.padding and model.info.dimensions == 32 and model.info.task is Task.EMBED
    together = normalised(model.encoder.encode(texts()))
    alone = normalised(np.concatenate([model.encoder.encode([text]) for text in texts()]))
    assert np.abs(together - alone).max() < 1e-5
    # Unlike enough for that to mean something.
    assert (together @ together.T - np.eye(len(LENGTHS))).max() < 0.999


@pytest.mark.parametrize(("config", "first"), [(BERT, 0), (ROBERTA, 2)])
@pytest.mark.parametrize("prefix", ["", "own"])
def test_bert_and_roberta_equal_a_float64_reference(
    config: dict[str, Any], first: int, prefix: str, tmp_path: Path
) -> None:
    weights = folders.random_weights(config)
    reference = float64(weights)
    if prefix:  # as a part of a bigger model, whose other weights are not ours
        name = "bert" if config is BERT else "roberta"
        weights = {f"{name}.{key}": array for key, array in weights.items() if not key.startswith("pooler")}
        weights["cls.predictions.bias"] = mx.zeros(3)
    model = load_embedder(folders.write(tmp_path / "m", config, weights), "m", dtype="float32")
    found = normalised(model.encoder.encode(texts()))
    for text, vector in zip(texts(), found, strict=True):
        wanted = unit(hidden_states(reference, config, text.token_ids, (), first).mean(axis=0))
        assert np.abs(vector - wanted).max() < 1e-5


def test_qwen3_has_the_hidden_states_of_mlx_lms_model(tmp_path: Path) -> None:
    from mlx_lm.models import qwen3

    weights = folders.random_weights(QWEN3)
    model = load_embedder(folders.write(tmp_path / "m", QWEN3, weights), "m", dtype="float32")
    other = qwen3.Qwen3Model(qwen3.ModelArgs.from_dict(QWEN3))
    other.load_weights(list(weights.items()))
    assert model.info.pooling == "lasttoken"
    for text, vector in zip(texts(), model.encoder.encode(texts()), strict=True):
        last = np.array(other(mx.array([text.token_ids]))[0, -1])
        assert np.abs(unit(vector.astype(np.float64)) - unit(last.astype(np.float64))).max() < 1e-5


@pytest.mark.parametrize("config", [MODERNBERT, GEMMA])
def test_local_layers_see_half_a_window_to_each_side(config: dict[str, Any]) -> None:
    one_layer = {**config, "num_hidden_layers": 1}
    if config is MODERNBERT:  # whose first layer is global
        one_layer |= {"num_hidden_layers": 2}
    family = FAMILIES[config["model_type"]]
    layers = make_layers(family, one_layer)
    layers.load_weights(list(folders.random_weights(one_layer).items()))
    if config is MODERNBERT:
        layers.layers = layers.layers[1:]
    mask, types = mx.ones((1, 20), mx.bool_), mx.zeros((1, 20), mx.int32)

    def state(tokens: list[int]) -> Array:
        return np.array(family.hidden(layers, mx.array([tokens]), types, mask)[0, 10], np.float64)

    tokens = list(range(10, 30))
    before = state(tokens)
    for place, seen in ((5, False), (6, True), (14, True), (15, False)):
        changed = state([*tokens[:place], 5, *tokens[place + 1 :]])
        assert bool(np.abs(changed - before).max() > 1e-6) is seen, place


HEADS = {
    "bert": {"classifier.weight": (1, 32), "classifier.bias": (1,)},
    "xlm-roberta": {
        "classifier.dense.weight": (32, 32),
        "classifier.dense.bias": (32,),
        "classifier.out_proj.weight": (1, 32),
        "classifier.out_proj.bias": (1,),
    },
    "modernbert": {
        "head.dense.weight": (32, 32),
        "head.norm.weight": (32,),
        "classifier.weight": (1, 32),
        "classifier.bias": (1,),
    },
}
ARCHITECTURES = {
    "bert": "BertForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
}


def cross_encoder(family: str, folder: Path, **settings: object) -> tuple[dict[str, mx.array], Any]:
    config = {**CONFIGS[family], "architectures": [ARCHITECTURES[family]], **settings}
    prefix = {"bert": "bert.", "xlm-roberta": "roberta.", "modernbert": "model."}[family]
    layers = {prefix + name: array for name, array in folders.random_weights(config).items()}
    weights = {**layers, **folders.head_weights(HEADS[family])}
    model = load_embedder(folders.write(folder, config, weights), "m", dtype="float32")
    assert (model.info.task, model.info.dimensions, model.info.pooling) == (Task.SCORE, 1, "")
    return {name.removeprefix(prefix): array for name, array in weights.items()}, model


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_cross_encoders_equal_a_float64_reference(family: str, tmp_path: Path) -> None:
    weights, model = cross_encoder(family, tmp_path / "m")
    reference, config = float64(weights), CONFIGS[family]
    asked = pairs(types=family == "bert")
    scores = model.encoder.encode(asked)
    assert scores.shape == (4, 1)
    for pair, score in zip(asked, scores[:, 0], strict=True):
        first = 0 if family == "bert" else 2
        state = hidden_states(reference, config, pair.token_ids, pair.type_ids, first)[0]
        if family == "bert":
            logit = linear(np.tanh(linear(state, reference, "pooler.dense")), reference, "classifier")
        else:
            dense = np.tanh(linear(state, reference, "classifier.dense"))
            logit = linear(dense, reference, "classifier.out_proj")
        assert score == pytest.approx(1 / (1 + np.exp(-logit[0])), abs=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernberts_head_equals_a_float64_reference(pooling: str, tmp_path: Path) -> None:
    weights, model = cross_encoder("modernbert", tmp_path / "m", classifier_pooling=pooling)
    reference = {**float64(weights), "head.norm.bias": np.zeros(32), "head.dense.bias": np.zeros(32)}
    layers = make_layers(FAMILIES["modernbert"], MODERNBERT)
    layers.load_weights(
        [(name, array) for name, array in weights.items() if not name.startswith(("head", "cl"))]
    )
    asked = pairs(types=False)
    for pair, score in zip(asked, model.encoder.encode(asked)[:, 0], strict=True):
        ids = mx.array([pair.token_ids])
        states = np.array(
            FAMILIES["modernbert"].hidden(layers, ids, ids, mx.ones(ids.shape, mx.bool_)), np.float64
        )[0]
        pooled = states[0] if pooling == "cls" else states.mean(axis=0)
        normed = layer_norm(gelu(linear(pooled, reference, "head.dense")), reference, "head.norm", 1e-5)
        logit = linear(normed, reference, "classifier")[0]
        assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


def test_the_function_over_a_score_is_the_configurations(tmp_path: Path) -> None:
    _, plain = cross_encoder("bert", tmp_path / "plain")
    for number, settings in enumerate(
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        )
    ):
        _, identity = cross_encoder("bert", tmp_path / str(number), **settings)
        logits = identity.encoder.encode(pairs(True)).astype(np.float64)
        assert 1 / (1 + np.exp(-logits)) == pytest.approx(plain.encoder.encode(pairs(True)), abs=1e-6)


def test_quantized_weights(tmp_path: Path) -> None:
    config = {**BERT, "hidden_size": 64, "intermediate_size": 64}
    layers = make_layers(FAMILIES["bert"], config)
    layers.load_weights(list(folders.random_weights(config).items()))
    nn.quantize(layers, group_size=32, bits=8)
    from mlx.utils import tree_flatten

    weights = dict(tree_flatten(layers.parameters()))
    settings = {**config, "quantization": {"group_size": 32, "bits": 8}}
    quantized = load_embedder(folders.write(tmp_path / "q", settings, weights), "q")
    assert quantized.info.dtype == "8-bit"
    full = load_embedder(folders.write(tmp_path / "f", config, folders.random_weights(config)), "f")
    left, right = (normalised(model.encoder.encode(texts())) for model in (quantized, full))
    assert (left * right).sum(axis=1).min() > 0.99
    assert np.abs(left - right).max() > 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_near(dtype: str, tmp_path: Path) -> None:
    for config in (BERT, MODERNBERT):
        folder = folders.write(tmp_path / config["model_type"], config, folders.random_weights(config))
        half, full = load_embedder(folder, "h", dtype=dtype), load_embedder(folder, "f", dtype="float32")
        widened = config is MODERNBERT and dtype == "float16"
        assert half.info.dtype == ("float32" if widened else dtype)
        left, right = (normalised(model.encoder.encode(texts())) for model in (half, full))
        assert (left * right).sum(axis=1).min() > 0.99
