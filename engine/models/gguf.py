"""GGUF files of the llama family to model folders that mlx-lm loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from gguf.quants import dequantize

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.folders import build_folder
from chairlift.engine.models.gguf_file import GGUFFile, GGUFTensor
from chairlift.engine.models.gguf_tokenizer import write_tokenizer
from chairlift.engine.models.gguf_weights import (
    FLOAT_KINDS,
    FLOAT_TYPES,
    GROUP,
    KEPT_BITS,
    FloatType,
    WeightSource,
    float_weight,
    quantized_weight,
    rope_order,
)
from chairlift.engine.models.progress import byte_progress
from chairlift.engine.models.safetensors_file import PlannedTensor, write_safetensors

Dtype = Literal["float32", "float16", "bfloat16", "keep"]
DTYPES: tuple[str, ...] = get_args(Dtype)

CONVERSION = "v1"
"""Part of the name of converted folders in the cache: changes when the conversion does."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IGNORED_SUFFIXES = ("rope_freqs.weight", "attn_rot_embd.weight", "attn_rot_embd")
"""Not weights: the first is read into the configuration, the others hold what the configuration says."""


def convert_gguf(path: Path, to: Path, dtype: Dtype = "keep", *, progress: bool = False) -> Path:
    """Convert the llama-family GGUF file `path` to the model folder `to`, whole or not at all.

    `dtype` is the type of the weights; "keep" leaves quantized weights quantized where MLX holds the format
    without loss (Q4_0, Q4_1, Q8_0), and floats in the type that most of the file is in.

    Raises:
        ModelUnavailable: one line that says why not: no sound GGUF file, another architecture, an unknown
            pre-tokenizer, a format that cannot be kept, `to` in use.
    """
    if to.exists():
        if not to.is_dir() or any(to.iterdir()):
            raise ModelUnavailable(f"{to} exists already; name another folder.")
        to.rmdir()
    return build_folder(to, lambda folder: fill_model_folder(path, folder, dtype, progress=progress))


def fill_model_folder(path: Path, folder: Path, dtype: Dtype, *, progress: bool = False) -> None:
    """Write the files of a model folder into `folder`. Raises as `convert_gguf`."""
    file = GGUFFile(path)
    check_supported(file)
    config = model_config(file)
    weights, quantization, floats = plan_weights(file, config, dtype)
    config["torch_dtype"] = floats
    if quantization:
        config["quantization"] = quantization
    special = write_tokenizer(file, folder, context_length=config["max_position_embeddings"])
    write_json(folder / "config.json", config | special)
    write_json(folder / "generation_config.json", {"_from_model_config": True, **special})
    total = sum(tensor.nbytes for tensor in weights)
    with byte_progress(f"Converting {path.name}", total, shown=progress) as done:
        for written in write_safetensors(folder / "model.safetensors", weights):
            done(written)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_supported(file: GGUFFile) -> None:
    """Refuse what would be converted wrongly."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelUnavailable(
            f"{file.path}: the architecture {architecture!r} cannot be imported from GGUF; only 'llama' can. "
            "Use the model's safetensors version."
        )
    parts = file.metadata.get("split.count", 1)
    if parts > 1:
        raise ModelUnavailable(f"{file.path} is one of {parts} parts; merge them first (llama-gguf-split).")
    if file.metadata.get("llama.expert_count", 0):
        raise ModelUnavailable(f"{file.path} is a mixture of experts, which cannot be imported from GGUF.")
    for key in ("attention.scale", "logit_scale", "residual_scale", "embedding_scale", "attention.causal"):
        if f"llama.{key}" in file.metadata:
            raise ModelUnavailable(f"{file.path}: the setting llama.{key} is not supported.")


def model_config(file: GGUFFile) -> dict[str, Any]:
    """`config.json` of the Hugging Face Llama, as far as the metadata and the tensors' shapes tell it."""

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{key}", default)
        if value is None:
            raise file.damaged(f"lacks llama.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelUnavailable(f"{file.path}: llama.{key} differs between layers: not supported.")
            return value[0]
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    if not heads:
        raise file.damaged("has no attention heads")
    head_dim = get("attention.key_length", hidden // heads)
    if (
        get("rope.dimension_count", head_dim) != head_dim
        or get("attention.value_length", head_dim) != head_dim
    ):
        raise ModelUnavailable(f"{file.path}: heads with a partial rotation or unequal sizes: not supported.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.damaged("lacks token_embd.weight")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "num_attention_heads": heads,
        "num_hidden_layers": get("block_count"),
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_scaling": rope_scaling(file, head_dim),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": embedding.shape[0],
    }


def rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` of a Hugging Face configuration; None where positions are not scaled."""
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factor = file.metadata.get("llama.rope.scaling.factor", file.metadata.get("llama.rope.scale_linear", 1.0))
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim)
    stated = "llama.rope.scaling.type" in file.metadata
    if (kind == "none" and stated) or factor in (0.0, 1.0):
        return None
    if kind in ("none", "linear"):  # "none" by default: old files give the factor alone
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.metadata.get("llama.rope.scaling.original_context_length")
        if original is None:
            raise file.damaged("lacks llama.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelUnavailable(f"{file.path}: the rope scaling {kind!r} is not supported.")


def _llama3_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling. The file holds the divisors it makes, one a frequency; the settings that make just
    these are found again, or the file is refused (formula: transformers, `modeling_rope_utils.py`,
    `_compute_llama3_parameters`)."""
    tensor = file.tensors["rope_freqs.weight"]
    divisors = dequantize(file.rows(tensor), tensor.type).astype(np.float64).reshape(-1)
    base = file.metadata.get("llama.rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    factor = float(divisors.max())
    for original in (8192, 4096, 2048, 16384, 32768, 131072):
        smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ModelUnavailable(f"{file.path}: its rope_freqs.weight is not Llama 3's scaling: not supported.")


def plan_weights(
    file: GGUFFile, config: dict[str, Any], dtype: Dtype
) -> tuple[list[PlannedTensor], dict[str, Any], FloatType]:
    """The tensors to write, mlx-lm's quantization settings (empty: none), and the type of plain floats."""
    heads, kv_heads, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    orders = {"attn_q": rope_order(heads, head_dim), "attn_k": rope_order(kv_heads, head_dim)}
    floats = kept_float_type(file) if dtype == "keep" else dtype
    shapes = expected_shapes(config)
    planned: list[PlannedTensor] = []
    quantization: dict[str, Any] = {}
    for tensor in file.tensors.values():
        if tensor.name.endswith(_IGNORED_SUFFIXES):
            continue
        name = hugging_face_name(file, tensor)
        if shapes.pop(name, None) != tensor.shape:
            raise file.damaged(f"holds {tensor.name} in a shape that its settings do not give")
        part = tensor.name.split(".")[-2]
        source = WeightSource(file, tensor, orders.get(part))
        if dtype != "keep" or tensor.type in FLOAT_KINDS:
            planned.append(float_weight(name, source, floats))
        elif tensor.type in KEPT_BITS:
            planned += quantized_weight(name, source)
            settings = {"group_size": GROUP, "bits": KEPT_BITS[tensor.type], "mode": "affine"}
            quantization[name.removesuffix(".weight")] = settings
        else:
            raise ModelUnavailable(
                f"{file.path} holds {tensor.name} as {tensor.type.name}, which MLX cannot hold as it is; "
                "convert to float16, bfloat16 or float32."
            )
    planned += _zero_biases(shapes, floats)
    if missing := sorted(shapes):
        raise file.damaged(f"lacks the tensor for {missing[0]}")
    if quantization:
        quantization = {"group_size": GROUP, "bits": _commonest_bits(quantization.values()), **quantization}
    return planned, quantization, floats


def hugging_face_name(file: GGUFFile, tensor: GGUFTensor) -> str:
    match tensor.name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as last] if part in _LAYER_NAMES and layer.isdigit():
            return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{last}"
        case [part, "weight"] if part in _NAMES:
            return f"{_NAMES[part]}.weight"
    raise ModelUnavailable(f"{file.path} holds {tensor.name}, which a llama does not have: not supported.")


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What mlx-lm's Llama of this configuration has to be given."""
    hidden, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _zero_biases(shapes: dict[str, tuple[int, ...]], dtype: FloatType) -> list[PlannedTensor]:
    """Zeros for biases that the file leaves out where its siblings have one; taken out of `shapes`."""
    names = [name for name in shapes if name.endswith(".bias")]
    form = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    width = np.uint32 if dtype == "float32" else np.uint16

    def zeros(name: str) -> PlannedTensor:
        shape = shapes.pop(name)
        return PlannedTensor(name, form, shape, lambda: [np.zeros(shape, width)])

    return [zeros(name) for name in names]


def can_keep(file: GGUFFile) -> bool:
    """Every tensor is in a format that MLX holds as it is."""
    return all(tensor.type in FLOAT_KINDS or tensor.type in KEPT_BITS for tensor in file.tensors.values())


def kept_float_type(file: GGUFFile) -> FloatType:
    """The type of most float weights; float16, the type of the scales, where the file is quantized (its
    few float32 vectors would make every activation float32)."""
    if any(tensor.type in KEPT_BITS for tensor in file.tensors.values()):
        return "float16"
    sizes: dict[FloatType, int] = dict.fromkeys(FLOAT_KINDS.values(), 0)
    for tensor in file.tensors.values():
        if tensor.type in FLOAT_KINDS:
            sizes[FLOAT_KINDS[tensor.type]] += tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind])


def _commonest_bits(settings: Iterable[dict[str, Any]]) -> int:
    bits: list[int] = [layer["bits"] for layer in settings]
    return max(set(bits), key=bits.count)


def dtype_named(name: str) -> Dtype:
    """`name` as a `Dtype`.

    Raises:
        ModelUnavailable: it is none.
    """
    if name not in DTYPES:
        raise ModelUnavailable(f"{name!r} is no dtype; one of {', '.join((*FLOAT_TYPES, 'keep'))} is.")
    return cast(Dtype, name)
