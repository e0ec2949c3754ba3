"""Small embedding models with random weights, as folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from chairlift.engine.embedding.families import FAMILIES, make_layers

VOCAB = 64
Config = dict[str, Any]

BERT: Config = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
ROBERTA: Config = {
    **BERT,
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "max_position_embeddings": 50,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
MODERNBERT: Config = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
}
QWEN3: Config = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
GEMMA: Config = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 48,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "use_bidirectional_attention": True,
}
LLAMA: Config = {
    "model_type": "llama_bidirec",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}


def random_weights(config: Config) -> dict[str, mx.array]:
    """Of the layers, none of them the ones and zeros that norms and biases begin with."""
    generator = np.random.default_rng(7)
    layers = make_layers(FAMILIES[config["model_type"]], config)
    return {
        name: mx.array(_random(generator, name, array.shape))
        for name, array in tree_flatten(layers.parameters())
    }


def _random(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = generator.standard_normal(shape) * 0.3
    if len(shape) == 1 and name.endswith("weight"):
        values = 1 + values / 2
    return values.astype(np.float32)


def head_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, mx.array]:
    generator = np.random.default_rng(8)
    return {name: mx.array(_random(generator, name, shape)) for name, shape in shapes.items()}


def write(folder: Path, config: Config, weights: dict[str, mx.array], **files: object) -> Path:
    """`files`: JSON files by name without ending; `__` stands for a slash."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def tokenizer() -> Tokenizer:
    """Words w4 .. w63, between tokens 2 and 3."""
    words = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, **{f"w{n}": n for n in range(4, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 2), ("</s>", 3)],
    )
    return made


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
