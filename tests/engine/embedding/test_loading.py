"""What a folder says, and what is refused."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_embeddings")

import mlx.core as mx

from chairlift.engine.embedding.families import FAMILIES
from chairlift.engine.embedding.heads import SCORED_FAMILIES
from chairlift.engine.embedding.loader import _batch_tokens, load_embedder
from chairlift.engine.embedding.pooling import Pooling, pool
from chairlift.engine.embedding.types import TokenizedText
from chairlift.engine.embedding.vectors import normalised
from chairlift.engine.errors import ContextLengthExceeded, ModelUnavailable
from chairlift.engine.memory.guard import SPARE
from tests.engine.embedding import folders
from tests.engine.embedding.folders import BERT, MODULES, QWEN3, ROBERTA

TEXTS = [TokenizedText((2, 10, 11, 12, 3)), TokenizedText((2, 20, 3)), TokenizedText((2, 30, 31, 3))]


def pooling_of(flag: str) -> dict[str, object]:
    return {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, flag: True}


def test_every_pooling() -> None:
    generator = np.random.default_rng(0)
    hidden = generator.standard_normal((3, 5, 4)).astype(np.float32)
    lengths = (5, 2, 1)
    mask = np.arange(5)[None, :] < np.array(lengths)[:, None]
    spoiled = np.where(mask[:, :, None], hidden, np.nan)
    for how, formula in {
        Pooling.CLS: lambda states: states[0],
        Pooling.LAST: lambda states: states[-1],
        Pooling.MEAN: lambda states: states.mean(axis=0),
        Pooling.MAX: lambda states: states.max(axis=0),
        Pooling.MEAN_SQRT: lambda states: states.sum(axis=0) / len(states) ** 0.5,
        Pooling.WEIGHTED_MEAN: lambda states: np.average(states, axis=0, weights=range(1, 1 + len(states))),
    }.items():
        wanted = [
            formula(states[:length].astype(np.float64))
            for states, length in zip(hidden, lengths, strict=True)
        ]
        found = np.array(pool(mx.array(spoiled), mx.array(mask), how))
        assert found == pytest.approx(np.array(wanted), abs=1e-6), how


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="other devices keep buffers in other sizes")
@pytest.mark.parametrize("family", [BERT, folders.MODERNBERT, QWEN3, folders.GEMMA, folders.LLAMA])
def test_what_batches_take_is_known(family: folders.Config, tmp_path: Path) -> None:
    config = {**family, "max_position_embeddings": 2048, "hidden_size": 128, "intermediate_size": 256}
    if "head_dim" in family:
        config["head_dim"] = 32
    folder = folders.write(tmp_path, config, folders.random_weights(config))
    loaded = load_embedder(folder, "x", pooling="mean")
    cost = loaded.info.batch_cost
    assert cost is not None and loaded.info.batch_tokens < 2000 and loaded.device is not None
    for texts, length in ((1, 512), (8, 64), (64, 8), (1, 2000)):
        batch = [TokenizedText(tuple((7 * at + row) % 64 for at in range(length))) for row in range(texts)]
        known, taken = SPARE * texts * cost.of(length), [2**60]
        while min(taken) > known and len(taken) < 6:  # peaks differ with how far the host is ahead
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            loaded.encoder.encode(batch)
            taken.append(mx.get_peak_memory() - before)
        assert min(taken) <= known <= 2 * max(taken[1:]), (texts, length)


def test_pooling_is_the_folders_or_the_operators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = folders.random_weights(BERT)
    said = folders.write(
        tmp_path / "said",
        BERT,
        weights,
        modules=MODULES,
        **{"1_Pooling__config": pooling_of("pooling_mode_cls_token")},
    )
    newer = folders.write(
        tmp_path / "newer", BERT, weights, modules=MODULES, **{"1_Pooling__config": {"pooling_mode": "cls"}}
    )
    silent = folders.write(tmp_path / "silent", BERT, weights)
    with caplog.at_level(logging.WARNING):
        cls, also = load_embedder(said, "a"), load_embedder(newer, "a")
        asked = load_embedder(silent, "c", pooling="cls")
        assert caplog.messages == []
        mean = load_embedder(silent, "b")
        assert caplog.messages == ["b does not say how its tokens are pooled; mean is assumed."]
    assert [model.info.pooling for model in (cls, also, asked, mean)] == ["cls", "cls", "cls", "mean"]
    vectors = [model.encoder.encode(TEXTS) for model in (cls, also, asked, mean)]
    assert np.array_equal(vectors[0], vectors[1]) and np.array_equal(vectors[0], vectors[2])
    assert not np.allclose(vectors[0], vectors[3])


def test_dense_layers(tmp_path: Path) -> None:
    weights = folders.random_weights(BERT)
    modules = [
        *MODULES,
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    files = {
        "1_Pooling__config": pooling_of("pooling_mode_mean_tokens"),
        "2_Dense__config": {"activation_function": "torch.nn.modules.activation.Tanh"},
    }
    folder = folders.write(tmp_path / "m", BERT, weights, modules=modules, **files)
    dense = folders.head_weights({"linear.weight": (8, 32), "linear.bias": (8,)})
    mx.save_safetensors(str(folder / "2_Dense" / "model.safetensors"), dense)
    plain = load_embedder(folders.write(tmp_path / "p", BERT, weights, modules=MODULES, **files), "p")
    model = load_embedder(folder, "m")
    assert model.info.dimensions == 8
    weight, bias = (np.array(dense[f"linear.{part}"], np.float64) for part in ("weight", "bias"))
    wanted = np.tanh(plain.encoder.encode(TEXTS).astype(np.float64) @ weight.T + bias)
    assert model.encoder.encode(TEXTS) == pytest.approx(wanted, abs=1e-5)
    # mlx-embeddings' conversions have such layers among the model's own weights, without a bias.
    own = folders.write(tmp_path / "o", BERT, {**weights, "dense.0.weight": dense["linear.weight"]})
    assert load_embedder(own, "o").encoder.encode(TEXTS) == pytest.approx(
        plain.encoder.encode(TEXTS).astype(np.float64) @ weight.T, abs=1e-5
    )


def test_the_longest_text(tmp_path: Path) -> None:
    for name, config, said, longest in (
        ("table", BERT, {}, 48),
        ("roberta", ROBERTA, {}, 48),
        ("said", BERT, {"sentence_bert_config": {"max_seq_length": 20}}, 20),
        ("more", BERT, {"sentence_bert_config": {"max_seq_length": 200}}, 48),
    ):
        folder = folders.write(tmp_path / name, config, folders.random_weights(config), **said)
        model = load_embedder(folder, name)
        assert model.info.context_length == longest
        whole = TokenizedText((5,) * longest)
        assert np.isfinite(normalised(model.encoder.encode([whole, TEXTS[0]]))).all()


def test_a_bigger_model_has_smaller_batches() -> None:
    config = {"vocab_size": 30_000, "hidden_size": 384}
    table = 30_000 * 384
    sizes = [
        _batch_tokens(table + parameters, config) for parameters in (10**6, 2 * 10**7, 5 * 10**7, 10**10)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == 64


def test_tokens_of_a_folder(tmp_path: Path) -> None:
    tokenizer = load_embedder(
        folders.write(tmp_path / "m", BERT, folders.random_weights(BERT)), "m"
    ).tokenizer
    assert tokenizer.encode("w5 w6") == TokenizedText((2, 5, 6, 3))
    assert tokenizer.encode("w5", "w6 w7") == TokenizedText((2, 5, 3, 6, 7, 3), (0, 0, 0, 1, 1, 1))
    assert tokenizer.encode("w5 w6 w7", limit=3) == TokenizedText((2, 5, 3))
    assert tokenizer.encode("w5 w6 w7", limit=2, add_special_tokens=False) == TokenizedText((5, 6))
    assert tokenizer.encode("w5 w6", limit=4) == TokenizedText((2, 5, 6, 3))
    assert tokenizer.encode("w5", "w6 w7", limit=5) == TokenizedText((2, 5, 3, 6, 3), (0, 0, 0, 1, 1))
    for arguments in (("w5", None, 2), ("w5 w6", "w7", 5)):
        with pytest.raises(ContextLengthExceeded, match="leaves no room"):
            tokenizer.encode(arguments[0], arguments[1], limit=arguments[2])


CROSS = {**BERT, "architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BERT, "model_type": "llama"}, r"m \(llama\) makes no embeddings here; families: bert, "),
        ({"hidden_size": 3}, "of no family"),
        ({**BERT, "hidden_act": "relu"}, "its hidden_act is relu, and gelu is supported"),
        ({**BERT, "position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({**folders.GEMMA, "use_bidirectional_attention": None}, "use_bidirectional_attention is None"),
        ({**BERT, "num_hidden_layers": 3}, "lacks the weight encoder.layer.2"),
        ({**BERT, "intermediate_size": 40}, "has the shape"),
        (CROSS, "lacks a weight of its head: classifier.weight"),
        ({**QWEN3, "architectures": ["Qwen3ForSequenceClassification"]}, "scores in a way"),
        ({**CROSS, "sentence_transformers": {"activation_fn": "x.Tanh"}}, "puts Tanh over its scores"),
    ],
)
def test_refusals(config: dict[str, object], message: str, tmp_path: Path) -> None:
    weights = folders.random_weights(QWEN3 if config.get("model_type") == "qwen3" else BERT)
    folder = folders.write(tmp_path / "m", config, weights)
    with pytest.raises(ModelUnavailable, match=message) as refusal:
        load_embedder(folder, "m")
    assert "\n" not in refusal.value.message


def test_classifiers_and_quantized_heads_are_refused(tmp_path: Path) -> None:
    weights = folders.random_weights(BERT)
    for name, shape, message in (
        ("classifier.weight", (3, 32), "sorts texts into 3 classes"),
        ("classifier.scales", (1, 1), "quantized head"),
    ):
        folder = folders.write(tmp_path / name, CROSS, {**weights, **folders.head_weights({name: shape})})
        with pytest.raises(ModelUnavailable, match=message):
            load_embedder(folder, "m")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": [{"type": "x.models.WordWeights"}]}, "kind WordWeights"),
        ({"modules": {"type": "x"}}, "modules.json is not what it should be"),
        ({"modules": MODULES}, "1_Pooling/config.json cannot be read"),
        ({"modules": MODULES, "1_Pooling__config": {}}, r"not supported \(none\)"),
        (
            {
                "modules": MODULES,
                "1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            },
            r"\(cls, max\)",
        ),
        (
            {"modules": [{"type": "Dense", "path": "d"}], "d__config": {"activation_function": "SiLU"}},
            "with SiLU",
        ),
        ({"modules": [{"type": "Dense", "path": "d"}], "d__config": {}}, "no safetensors"),
    ],
)
def test_modules_that_are_refused(files: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "m", BERT, folders.random_weights(BERT), **files)
    with pytest.raises(ModelUnavailable, match=message):
        load_embedder(folder, "m")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="config.json cannot be read"):
        load_embedder(tmp_path, "m")
    folder = folders.write(tmp_path / "m", BERT, folders.random_weights(BERT))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="The tokenizer"):
        load_embedder(folder, "m")
    folders.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelUnavailable, match="model.safetensors cannot be read"):
        load_embedder(folder, "m")
    with pytest.raises(ModelUnavailable, match="--dtype int3"):
        load_embedder(folders.write(folder, BERT, folders.random_weights(BERT)), "m", dtype="int3")


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.write(tmp_path / "m", BERT, folders.random_weights(BERT))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_embeddings"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx_embeddings", None)
    with pytest.raises(ModelUnavailable, match=r"chairlift\[embeddings\]"):
        load_embedder(folder, "m")


def test_the_documentation_lists_the_families() -> None:
    page = Path(__file__).parents[3] / "docs" / "embeddings.md"
    table = page.read_text(encoding="utf-8").partition("## Models")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")][1:]
    listed = {name: kinds for kinds in rows for name in re.findall(r"`([^`]+)`", kinds[0])}
    assert {name: kinds[1].strip() for name, kinds in listed.items()} == dict.fromkeys(FAMILIES, "yes")
    assert {name for name, kinds in listed.items() if kinds[2].strip() == "yes"} == SCORED_FAMILIES


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


def test_nothing_in_a_folder_is_run_or_unpickled(tmp_path: Path) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "model"
    theirs = {"model_file": "theirs.py", "auto_map": {"AutoModel": "theirs.Theirs"}}
    folders.write(folder, {**BERT, **theirs}, folders.random_weights(BERT))
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    plain = folders.write(tmp_path / "plain", BERT, folders.random_weights(BERT))
    ours, clean = (load_embedder(path, "m").encoder.encode(TEXTS) for path in (folder, plain))
    np.testing.assert_array_equal(ours, clean)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="it has no safetensors file"):
        load_embedder(folder, "m")
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()
