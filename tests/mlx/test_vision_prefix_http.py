"""Conversations about images over HTTP: the next turn begins behind what the turns before have left."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.engine.models.vision_folders import write_folder
from tests.mlx.test_vision_http import NAME, picture, serving, write_model
from tests.mlx.vision_families import FAMILIES, VisionFamily, build
from tests.server.harness import CHAT
from tests.server.media.pictures import text

LETTERS = list(range(33, 90))
"""Tokens whose text is read back as the same tokens."""
TOKENS = 16
BEFORE_IMAGE = {"llava": len("<s>USER: ") - len("<s>") + 1, "qwen3_5": 0}
"""Tokens that a prompt with another image may take over: those before it, of which LLaVA's template puts few;
for a hybrid up to the last checkpoint before it, of which a short prompt leaves none."""


def write_llava(folder: Path) -> Path:
    """The processor's folder, and random weights that fit its tokens and pictures."""
    write_folder(folder, "llava")
    config: dict[str, Any] = copy.deepcopy({**FAMILIES["llava"].config, "model_type": "llava"})
    for name in ("image_token_id", "media_placeholder_token_id"):
        del config[name]  # other families' names of the same
    config.update(image_token_index=259, vocab_size=261)
    config["text_config"]["vocab_size"] = 261
    config["vision_config"].update(image_size=42, patch_size=14)
    model = build(VisionFamily("llava", config, FAMILIES["llava"].draw))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config.update(bos_token_id=257, eos_token_id=258)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["llava", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prefix") / request.param
    return write_llava(path) if request.param == "llava" else write_model(path, request.param)


class Said:
    """An answer: its text and log probabilities, and what usage says of the prompt."""

    def __init__(self, found: dict[str, Any]) -> None:
        choice, usage = found["choices"][0], found["usage"]
        self.text = choice["message"]["content"]
        self.logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        self.prompt = usage["prompt_tokens"]
        self.cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["completion_tokens"] == TOKENS == len(self.text)


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **more: object) -> Said:
    body = {
        "model": NAME,
        "messages": messages,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "allowed_token_ids": LETTERS,
        **more,
    }
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return Said(response.json())


def said(role: str, *parts: object) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


ABOUT = text("What is to be seen in this picture of a lift, and who rides it up the hill today? " * 2)


async def test_the_next_turn_about_an_image_begins_behind_it(folder: Path) -> None:
    async with serving(folder) as (client, _):
        first = [said("user", ABOUT, picture(64, 96, seed=0), text("Say it in sixteen letters."))]
        turn = await ask(client, first)
        second = [*first, said("assistant", text(turn.text)), said("user", text("And then?"))]
        warm = await ask(client, second)
        cold = await ask(client, second, cache_salt="of nobody else")
        other = copy.deepcopy(second)
        other[0]["content"][1] = picture(64, 96, seed=1)
        unlike = await ask(client, other)
        unlike_cold = await ask(client, other, cache_salt="of nobody else either")
    assert turn.cached <= 1, "the beginning of every text, which the test at start has left"
    assert (cold.cached, unlike_cold.cached) == (0, 0)
    # LLaVA's template writes an answer in another way than it asks for it; of the last token drawn, which was
    # never fed, there is nothing.
    assert warm.cached == turn.prompt + (0 if folder.name == "llava" else TOKENS - 1)
    assert warm.text == cold.text
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    assert unlike.cached == BEFORE_IMAGE[folder.name]
    assert unlike.text == unlike_cold.text
    assert unlike.logprobs == pytest.approx(unlike_cold.logprobs, abs=1e-4)
    assert unlike.logprobs != pytest.approx(warm.logprobs, abs=1e-4)
