"""Model folders of real shapes with random weights and a tokenizer of one token a byte.

A prompt of n ASCII characters is n tokens, and every token of the vocabulary decodes to text, so lengths are
exact and streams carry content.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from device_models import Shape, build
from mlx.utils import tree_flatten

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_model(shape: Shape, folder: Path, dtype: mx.Dtype) -> None:
    """`config.json`, `model.safetensors` and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**shape.config, "eos_token_id": 0, "torch_dtype": str(dtype).rpartition(".")[2]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(build(shape, dtype).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(shape.vocab_size, folder)


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    vocab = {END: 0}
    vocab.update({character: index for index, character in enumerate(byte_characters(), 1)})
    number = 0
    while len(vocab) < vocab_size:
        vocab[f"Ġw{number}"] = len(vocab)
        number += 1
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_characters() -> list[str]:
    """The characters that byte-level tokenizers write bytes as, by byte. Source: GPT-2's encoder."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters, extra = [], 0
    for byte in range(256):
        if byte in shown:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + extra))
            extra += 1
    return characters
