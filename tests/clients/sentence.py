"""A model folder of long context that says one sentence, for agents whose prompts are longer than 8k tokens.

A llama with the embedded model's tokenizer and small random weights, but for the embeddings and the head:
those follow each token of the sentence by the next, and the line break that ends a prompt by the first. So
its answer is known, ends by itself, and is the same at any temperature, while keys, values and prompts are
those of a real model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from chairlift.engine.models.embedded import embedded_model
from tests.clients.template import TEMPLATE

NAME = "sentence"
SENTENCE = "This small model can only say one short sentence."
CONTEXT = 262_144
HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 2, 1, 1, 96
"""So few, since attention over a prompt of 20k tokens is most of the time on a CPU."""

Weights = dict[str, np.ndarray]


def write_sentence_model(folder: Path) -> Path:
    """Make the folder, unless it is there."""
    if (folder / "model.safetensors").exists():
        return folder
    source = embedded_model("float32")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "tokenizer.json", folder)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "head_dim": HIDDEN // HEADS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer |= {"model_max_length": CONTEXT, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    said = words.encode("\n" + SENTENCE, add_special_tokens=False).ids
    end = words.token_to_id(tokenizer["eos_token"])
    save_file(_weights(config["vocab_size"], [*said, end]), folder / "model.safetensors", {"format": "mlx"})
    return folder


def _weights(vocabulary: int, said: list[int]) -> Weights:
    assert len(set(said)) == len(said)
    random = np.random.default_rng(0)

    def small(*shape: int) -> np.ndarray:
        return random.normal(0, 0.02, shape).astype(np.float32)

    def projections() -> Iterator[tuple[str, np.ndarray]]:
        width = HIDDEN // HEADS * KV_HEADS
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}.{name}.weight", np.ones(HIDDEN, np.float32)
            for name, rows in (("q", HIDDEN), ("k", width), ("v", width), ("o", HIDDEN)):
                yield f"{at}.self_attn.{name}_proj.weight", small(rows, HIDDEN)
            for name in ("gate", "up"):
                yield f"{at}.mlp.{name}_proj.weight", small(INNER, HIDDEN)
            yield f"{at}.mlp.down_proj.weight", small(HIDDEN, INNER)

    embeddings = random.choice(np.array([-1, 1], np.float32), (vocabulary, HIDDEN))
    head = np.zeros((vocabulary, HIDDEN), np.float32)
    for token, following in zip(said, said[1:], strict=False):
        head[following] = embeddings[token]
    return {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": head,
        **dict(projections()),
    }
