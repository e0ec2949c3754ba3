"""Folders of small random models, for servers that are treated badly."""

from __future__ import annotations

from pathlib import Path

from mlx_lm.utils import save_config, save_model

from tests.engine.models.vision_folders import write_tokenizer
from tests.mlx.families import FAMILIES, Family, build
from tests.mlx.test_quantized_kv import wide

CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(path: Path, name: str, **fields: object) -> Path:
    """One of `tests.mlx.families` in float32 over bytes as tokens, `fields` in its configuration beside."""
    config = wide(FAMILIES[name].config, **fields)
    path.mkdir(parents=True)
    save_model(path, build(Family(name, config)), donate_model=True)
    save_config({"model_type": name, **config}, path / "config.json")
    write_tokenizer(path, ["<|end|>"], eos_token="<|end|>", chat_template=CHAT)
    return path
