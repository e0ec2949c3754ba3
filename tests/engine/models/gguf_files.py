"""Small GGUF files for tests, written by the `gguf` package from random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize

Array = npt.NDArray[np.float32]

LAYERS, HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 32
"""Heads times their size is twice the hidden size, so that nothing can be mistaken for it."""

CONTROL, USER_DEFINED, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's part of a file."""

    tokens: list[str]
    types: list[int]
    keys: Mapping[str, Any]
    """Below `tokenizer.ggml.`: str, int, bool, or a list."""


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte (openai/gpt-2, encoder.py, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level(pre: str, *, bos: bool | None = None) -> Vocabulary:
    """All bytes, a few merges, two control tokens (0 and 1) and one that was added by hand."""
    merges = ["1 2", "Ġ t", "h e", "Ġt he", "Ġ Ġ", "a a", "' m"]
    joined = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|endoftext|>", "<|im_end|>", *byte_letters(), *joined, "<added>"]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3), USER_DEFINED]
    keys = {"model": "gpt2", "pre": pre, "merges": merges, "eos_token_id": 1, "bos_token_id": 0}
    return Vocabulary(tokens, types, keys if bos is None else {**keys, "add_bos_token": bos})


def sentencepiece() -> Vocabulary:
    """SentencePiece as Llama 2 has it: three control tokens, bytes, letters, and pieces by falling score."""
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁▁", "▁t", "he", "▁the", "▁a", "er", "▁", "t", "h", "e", "a", "r", "n", "1", "2"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * len(head) + [-float(rank) for rank in range(len(pieces))]
    keys = {
        "model": "llama",
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return Vocabulary([*head, *pieces], types, keys)


@dataclass
class Llama:
    """Random weights of a small Llama in Hugging Face's layout, and the settings of its file."""

    vocabulary: Vocabulary = field(default_factory=lambda: byte_level("smollm"))
    tied: bool = False
    attention_bias: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """More keys of the file, whole names; None takes a key away."""
    extra: dict[str, Array] = field(default_factory=dict)
    """More tensors of the file."""
    weights: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(7)
        queries, keys, vocabulary = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, len(self.vocabulary.tokens)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
        for layer in range(LAYERS):
            for name, shape in {
                "self_attn.q_proj": (queries, HIDDEN),
                "self_attn.k_proj": (keys, HIDDEN),
                "self_attn.v_proj": (keys, HIDDEN),
                "self_attn.o_proj": (HIDDEN, queries),
                "mlp.gate_proj": (MIDDLE, HIDDEN),
                "mlp.up_proj": (MIDDLE, HIDDEN),
                "mlp.down_proj": (HIDDEN, MIDDLE),
            }.items():
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
                if self.attention_bias and name in (
                    "self_attn.q_proj",
                    "self_attn.k_proj",
                    "self_attn.v_proj",
                ):
                    shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"model.layers.{layer}.{name}.weight"] = (HIDDEN,)
        shapes["model.norm.weight"] = (HIDDEN,)
        if not self.tied:
            shapes["lm_head.weight"] = (vocabulary, HIDDEN)
        self.weights = {
            name: (random.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
            for name, shape in shapes.items()
        }

    def write(self, path: Path, kind: Kind = Kind.F32) -> Path:
        """The file; matrices in `kind`, vectors in float32 as llama.cpp has them."""
        writer = GGUFWriter(path, "llama")
        metadata: dict[str, Any] = {
            "llama.block_count": LAYERS,
            "llama.context_length": 512,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": MIDDLE,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.key_length": HEAD_DIM,
            "llama.attention.value_length": HEAD_DIM,
            "llama.rope.dimension_count": HEAD_DIM,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 5000.0,
            "tokenizer.ggml.tokens": self.vocabulary.tokens,
            "tokenizer.ggml.token_type": self.vocabulary.types,
            **{f"tokenizer.ggml.{key}": value for key, value in self.vocabulary.keys.items()},
            **self.settings,
        }
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, weight in self.weights.items():
            gguf_name, data = to_llama_cpp(name, weight)
            _add_tensor(writer, gguf_name, data, kind if data.ndim == 2 else Kind.F32)
        for name, data in self.extra.items():
            _add_tensor(writer, name, data, Kind.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def to_llama_cpp(name: str, weight: Array) -> tuple[str, Array]:
    """Name and layout that llama.cpp's converter gives a weight (convert_hf_to_gguf.py, `LlamaModel`)."""
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    for heads, mark in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
        if mark in name:
            split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
            weight = split.swapaxes(1, 2).reshape(weight.shape)
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name, np.ascontiguousarray(weight)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, data: Array, kind: Kind) -> None:
    if kind in (Kind.F32, Kind.F16):
        writer.add_tensor(name, data.astype(np.float32 if kind is Kind.F32 else np.float16))
    else:
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
