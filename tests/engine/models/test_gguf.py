"""GGUF files become the models they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from gguf import GGMLQuantizationType as Kind  # noqa: E402
from gguf.quants import dequantize, quantize  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from chairlift.engine.errors import ModelUnavailable  # noqa: E402
from chairlift.engine.models.gguf import convert_gguf, dtype_named  # noqa: E402
from chairlift.engine.models.gguf_weights import rope_order, round_to  # noqa: E402
from tests.engine.models.gguf_files import HEAD_DIM, HEADS, KV_HEADS, Llama, byte_level  # noqa: E402

TOKENS = [[5, 77, 200, 3, 3, 120, 9, 41]]


def logits(folder: Path) -> np.ndarray[Any, Any]:
    model, _ = load_model(folder)
    return np.array(model(mx.array(TOKENS)).astype(mx.float32))


def original_logits(llama: Llama, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """By mlx-lm's Llama from the weights as they were, never in a file."""
    model = Model(ModelArgs.from_dict(config))
    weights = {name: mx.array(weight) for name, weight in llama.weights.items()}
    if llama.attention_bias:  # mlx-lm's Llama has biases on all four projections or on none
        weights |= {f"model.layers.{layer}.self_attn.o_proj.bias": mx.zeros(64) for layer in range(2)}
    model.load_weights(list(weights.items()))
    return np.array(model(mx.array(TOKENS)))


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def written(folder: Path) -> dict[str, Any]:
    arrays: dict[str, Any] = mx.load(str(folder / "model.safetensors"))
    return arrays


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_float32_file_gives_the_original_logits(tmp_path: Path, tied: bool, bias: bool) -> None:
    llama = Llama(tied=tied, attention_bias=bias)
    folder = convert_gguf(llama.write(tmp_path / "m.gguf"), tmp_path / "m", "float32")
    config = config_of(folder)
    expected_config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "vocab_size": len(llama.vocabulary.tokens),
        "torch_dtype": "float32",
    }
    assert config | expected_config == config
    weights = written(folder)
    for name, weight in llama.weights.items():
        assert np.array_equal(np.array(weights.pop(name)), weight), name
    np.testing.assert_array_equal(logits(folder), original_logits(llama, config))


def test_without_undoing_the_permutation_the_logits_would_differ(tmp_path: Path) -> None:
    llama = Llama()
    folder = convert_gguf(llama.write(tmp_path / "m.gguf"), tmp_path / "m", "float32")
    expected = original_logits(llama, config_of(folder))
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weight = llama.weights[name]
        permuted = weight.reshape(HEADS, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        llama.weights[name] = permuted
    assert np.abs(original_logits(llama, config_of(folder)) - expected).max() > 0.1


def test_rope_order_by_hand() -> None:
    # One head of 6 rows: llama.cpp stores (0, 3), (1, 4), (2, 5) side by side; read back in order.
    stored = np.array([0, 3, 1, 4, 2, 5])
    assert stored[rope_order(1, 6)].tolist() == [0, 1, 2, 3, 4, 5]
    assert rope_order(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (Kind.F16, 11),
        (Kind.BF16, 8),
        (Kind.Q8_0, 7),
        (Kind.Q5_0, 4),
        (Kind.Q5_1, 4),
        (Kind.Q4_0, 3),
        (Kind.Q4_1, 3),
    ],
)
def test_every_format_comes_out_as_its_blocks_say(tmp_path: Path, kind: Kind, bits: int) -> None:
    llama = Llama()
    folder = convert_gguf(llama.write(tmp_path / "m.gguf", kind), tmp_path / "m", "float32")
    bits = {Kind.F16: 11, Kind.BF16: 8, Kind.Q8_0: 7, Kind.Q5_0: 4, Kind.Q5_1: 4, Kind.Q4_0: 3, Kind.Q4_1: 3}[
        kind
    ]
    weights = written(folder)
    for name, original in llama.weights.items():
        got = np.array(weights[name])
        if original.ndim == 1:
            assert np.array_equal(got, original)
            continue
        stored = original.astype(np.float16) if kind is Kind.F16 else quantize(original, kind)
        assert np.array_equal(got, stored if kind is Kind.F16 else dequantize(stored, kind)), name
        blocks = np.abs(original.reshape(-1, 32)).max(axis=1, keepdims=True)
        error = np.abs((got - original).reshape(-1, 32))
        assert (error <= blocks * 2.0 ** -(bits - 1)).all(), name
        assert error.max() > 0


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_dequantized(tmp_path: Path, kind: Kind) -> None:
    """`gguf` cannot write these, so the embedding is made of random blocks."""
    from gguf import GGML_QUANT_SIZES, GGUFWriter

    llama = Llama(tied=True)
    rows = len(llama.vocabulary.tokens)
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 60, (rows, size), dtype=np.uint8)
    path = tmp_path / "k.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in {"embedding_length": block, "feed_forward_length": 8, "context_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key in ("block_count", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 0 if key == "block_count" else 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list(llama.vocabulary.tokens)
    writer.add_token_types(llama.vocabulary.types)
    writer.add_token_merges(list(llama.vocabulary.keys["merges"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(block, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = convert_gguf(path, tmp_path / "k", "float32")
    got = np.array(written(folder)["model.embed_tokens.weight"])
    assert np.array_equal(got, dequantize(raw, kind))
    with pytest.raises(ModelUnavailable, match=f"token_embd.weight as {kind.name}.*convert to float16"):
        convert_gguf(path, tmp_path / "kept", "keep")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_kept_quantized_weights_are_the_same_numbers(tmp_path: Path, kind: Kind) -> None:
    llama = Llama()
    path = llama.write(tmp_path / "m.gguf", kind)
    kept, plain = convert_gguf(path, tmp_path / "kept"), convert_gguf(path, tmp_path / "plain", "float32")
    bits = 8 if kind is Kind.Q8_0 else 4
    assert config_of(kept)["quantization"]["bits"] == bits
    weights, floats = written(kept), written(plain)
    for name in (name for name, weight in llama.weights.items() if weight.ndim == 2):
        layer = name.removesuffix(".weight")
        scales, biases = (weights[f"{layer}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        dense = mx.dequantize(weights[name], scales, biases, group_size=32, bits=bits)
        # In float32 the products are exact, and so is the sum but for its last rounding.
        np.testing.assert_allclose(np.array(dense), np.array(floats[name]), rtol=2e-7, atol=1e-7)
    difference = np.abs(logits(kept) - logits(plain)).max()
    assert difference < 0.02 * np.abs(logits(plain)).max()  # activations in float16


def test_kept_floats_stay_in_the_type_of_most_weights(tmp_path: Path) -> None:
    llama = Llama()
    for kind, name, dtype in (
        (Kind.F16, "float16", mx.float16),
        (Kind.BF16, "bfloat16", mx.bfloat16),
        (Kind.F32, "float32", mx.float32),
    ):
        folder = convert_gguf(llama.write(tmp_path / f"{name}.gguf", kind), tmp_path / name)
        assert config_of(folder)["torch_dtype"] == name
        assert {weight.dtype for weight in written(folder).values()} == {dtype}


@pytest.mark.parametrize(("name", "dtype"), [("float16", "float16"), ("bfloat16", "bfloat16")])
def test_rounding_is_to_nearest_even_as_mlx_does_it(name: str, dtype: str) -> None:
    random = np.random.default_rng(3)
    values = np.concatenate(
        [
            random.standard_normal(4096).astype(np.float32) * np.float32(30),
            np.float32([0.0, -0.0, 1.00390625, 1.01171875, np.inf, -np.inf, 1e-40, 65504.0]),
        ]
    )
    got = round_to("float16" if name == "float16" else "bfloat16", values)
    expected = mx.array(values).astype(getattr(mx, dtype)).view(mx.uint16)
    assert np.array_equal(got.view(np.uint16), np.array(expected))
    assert np.isnan(
        np.array(mx.array(round_to("bfloat16", np.float32([np.nan]))).view(mx.bfloat16).astype(mx.float32))
    )


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    llama = Llama()
    llama.weights["model.norm.weight"][3] = 70000.0
    path = llama.write(tmp_path / "m.gguf")
    with pytest.raises(ModelUnavailable, match="output_norm.weight holds values too large for float16"):
        convert_gguf(path, tmp_path / "m", "float16")
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_llama3_scaling_is_found_again(tmp_path: Path) -> None:
    wavelengths = 2 * np.pi * 5000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = []
    for wavelength in wavelengths:  # as convert_hf_to_gguf.py, with factor 8 and an original context of 8192
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert 1.0 < divisors[-1] < 8.0 or divisors[-1] == 8.0
    llama = Llama(extra={"rope_freqs.weight": np.float32(divisors)})
    folder = convert_gguf(llama.write(tmp_path / "m.gguf"), tmp_path / "m", "float32")
    scaling = config_of(folder)["rope_scaling"]
    model, _ = load_model(folder)
    got = np.array(model.layers[0].self_attn.rope._freqs)
    base = 5000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert scaling["rope_type"] == "llama3"
    np.testing.assert_allclose(got, base * np.array(divisors), rtol=1e-5)
    llama.extra["rope_freqs.weight"] = np.float32(np.linspace(1, 3, HEAD_DIM // 2))
    with pytest.raises(ModelUnavailable, match="rope_freqs.weight is not Llama 3's"):
        convert_gguf(llama.write(tmp_path / "n.gguf"), tmp_path / "n", "float32")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any] | None) -> None:
    folder = convert_gguf(Llama(settings=settings).write(tmp_path / "m.gguf"), tmp_path / "m", "float32")
    assert config_of(folder)["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("llama", "message"),
    [
        (Llama(settings={"general.architecture": "qwen2"}), "architecture 'qwen2' cannot be imported"),
        (Llama(settings={"llama.expert_count": 8}), "mixture of experts"),
        (Llama(settings={"split.count": 3}), "one of 3 parts"),
        (Llama(settings={"llama.rope.dimension_count": 16}), "partial rotation"),
        (
            Llama(settings={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}),
            "'longrope'",
        ),
        (Llama(settings={"llama.embedding_length": None}), "lacks llama.embedding_length"),
        (Llama(settings={"llama.embedding_length": 32}), "shape that its settings do not give"),
        (Llama(settings={"llama.block_count": 3}), "lacks the tensor for model.layers.2"),
        (Llama(settings={"llama.logit_scale": 2.0}), "llama.logit_scale is not supported"),
        (Llama(settings={"llama.attention.head_count_kv": [2, 1]}), "differs between layers"),
        (Llama(extra={"blk.0.attn_q_norm.weight": np.ones(32, np.float32)}), "attn_q_norm.weight, which"),
        (Llama(vocabulary=byte_level("tekken")), "pre-tokenizer 'tekken', which is not supported; smollm"),
        (Llama(settings={"tokenizer.ggml.model": "bert"}), "tokenizer model 'bert'"),
        (Llama(settings={"tokenizer.ggml.eos_token_id": 99999}), "token 99999 as eos"),
    ],
)
def test_what_cannot_be_converted_rightly_is_refused_by_name(
    tmp_path: Path, llama: Llama, message: str
) -> None:
    path = llama.write(tmp_path / "m.gguf")
    with pytest.raises(ModelUnavailable, match=message) as refusal:
        convert_gguf(path, tmp_path / "m", "float32")
    assert "\n" not in refusal.value.message
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_the_folder_to_write_must_be_free(tmp_path: Path) -> None:
    path = Llama().write(tmp_path / "m.gguf")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note.txt").write_text("mine")
    with pytest.raises(ModelUnavailable, match="used exists already"):
        convert_gguf(path, tmp_path / "used", "float32")
    assert (tmp_path / "used" / "note.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (convert_gguf(path, tmp_path / "empty", "float32") / "config.json").is_file()


def test_dtype_names() -> None:
    assert dtype_named("keep") == "keep"
    with pytest.raises(
        ModelUnavailable, match="'int8' is no dtype; one of float32, float16, bfloat16, keep is"
    ):
        dtype_named("int8")


def test_kv_heads_are_permuted_as_kv_heads() -> None:
    """The two projections have orders of their own; the query's would be of another length."""
    assert len(rope_order(KV_HEADS, HEAD_DIM)) == 64
    assert len(rope_order(HEADS, HEAD_DIM)) == 128
