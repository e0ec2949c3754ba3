"""Small vision models in folders of their own, served over HTTP: text and images in one batch."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from chairlift.engine.engine import Engine
from chairlift.engine.models.loader import load_model
from chairlift.server.app import create_app
from chairlift.server.media.budget import MediaBudget
from chairlift.server.metrics import ServerMetrics
from chairlift.server.settings import ServerSettings
from tests.engine.models.vision_folders import QWEN_TOKENS, write_folder
from tests.mlx.vision_families import FAMILIES, VisionFamily, build
from tests.server.harness import CHAT, error_of, on_socket, stream_of
from tests.server.media.pictures import data_uri, encoded, image_part, text

NAME = "small"
SERVED = ("qwen2_5_vl", "qwen3_5")
IDS = {
    "image_token_id": 256 + QWEN_TOKENS.index("<|image_pad|>"),
    "video_token_id": 256 + QWEN_TOKENS.index("<|video_pad|>"),
    "vision_start_token_id": 256 + QWEN_TOKENS.index("<|vision_start|>"),
    "vision_end_token_id": 256 + QWEN_TOKENS.index("<|vision_end|>"),
    "vocab_size": 256 + len(QWEN_TOKENS),
}
PIXELS_A_TOKEN = {"qwen2_5_vl": 28, "qwen3_5": 32}


def write_model(folder: Path, family: str) -> Path:
    """The processor's folder, and random weights of the family that fit its tokens and patches."""
    write_folder(folder, family)
    config: dict[str, Any] = copy.deepcopy({**FAMILIES[family].config, "model_type": family})
    for name in ("image_token_index", "video_token_index", "media_placeholder_token_id"):
        del config[name]  # other families' names of the same
    config.update(IDS)
    if "text_config" in config:
        config["text_config"]["vocab_size"] = IDS["vocab_size"]
    patch = PIXELS_A_TOKEN[family] // 2
    config["vision_config"].update(patch_size=patch, spatial_patch_size=patch, window_size=4 * patch)
    model = build(VisionFamily(family, config, FAMILIES[family].draw))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config.update(bos_token_id=None, eos_token_id=256 + QWEN_TOKENS.index("<|im_end|>"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / request.param, request.param)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, MediaBudget]]:
    metrics = ServerMetrics()
    engine = Engine(partial(load_model, folder, NAME, dtype="float32"), observer=metrics.model(NAME))
    metrics.model(NAME).watch(engine)
    await engine.start()
    try:
        app = create_app(engine, ServerSettings(), metrics)
        async with (
            on_socket(app) as url,
            httpx.AsyncClient(base_url=url, timeout=120) as client,
        ):
            yield client, app.state.context.images.budget
    finally:
        await engine.stop()


def picture(height: int, width: int, seed: int) -> dict[str, object]:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image_part(data_uri(encoded(pixels)))


def body(*parts: object, **more: object) -> dict[str, object]:
    settings: dict[str, object] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, **more}
    return {"model": NAME, "messages": [{"role": "user", "content": list(parts)}], **settings}


async def answer(client: httpx.AsyncClient, *parts: object) -> tuple[tuple[str, ...], int]:
    """The answer's tokens, and how many the prompt had."""
    response = await client.post(CHAT, json=body(*parts, logprobs=True))
    assert response.status_code == 200, response.text
    found = response.json()
    tokens = found["choices"][0]["logprobs"]["content"]
    assert len(tokens) == found["usage"]["completion_tokens"] == 16
    return tuple(f"{token['token']}{token['bytes']}" for token in tokens), found["usage"]["prompt_tokens"]


async def test_text_and_images_at_once(folder: Path) -> None:
    """Every answer is its own, alone and beside the others: the same image twice gives the same one, another
    image of the same prompt another one."""
    ask = text("What is this?")
    conversations: list[tuple[object, ...]] = [
        (ask,),
        (ask, picture(64, 96, seed=0)),
        (ask, picture(64, 96, seed=1)),
        (picture(120, 60, seed=2), text("or"), picture(64, 64, seed=3), ask),
        (text("A longer text before the image. " * 6), picture(64, 96, seed=0)),
        (ask, picture(64, 96, seed=0)),
        (text("Only text, and rather more of it than the others have. " * 3),),
    ]
    async with serving(folder) as (client, budget):
        [card] = (await client.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text", "image"]
        alone = [await answer(client, *parts) for parts in conversations]
        together = await asyncio.gather(*(answer(client, *parts) for parts in conversations))
        await answer(client, ask)
        assert budget.used() == 0  # no array of a request outlives it
    assert together == alone
    plain, first, other, two, _, again, _ = alone
    assert first == again
    assert len({tokens for tokens, _ in (plain, first, other, two)}) == 4
    assert first[1] == other[1]

    side = PIXELS_A_TOKEN[folder.name]

    def tokens(height: int, width: int) -> int:
        return round(height / side) * round(width / side)

    around = 2  # vision_start and vision_end
    assert first[1] == plain[1] + around + tokens(64, 96)
    assert two[1] == plain[1] + len("or") + 2 * around + tokens(120, 60) + tokens(64, 64)


async def test_three_to_sixteen_at_once_on_the_qwen3_5_architecture(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """mlx-lm #965, Rapid-MLX #115: hybrid models whose answers leaked or fell apart with several at once."""
    folder = write_model(tmp_path_factory.mktemp("together") / "qwen3_5", "qwen3_5")
    conversations: list[tuple[object, ...]] = [
        (
            text("Why? " * (1 + 3 * number)),
            *([picture(64, 64 + 32 * (number % 3), seed=number)] * (number % 4 == 1)),
        )
        for number in range(16)
    ]
    async with serving(folder) as (client, _):
        alone = [await answer(client, *parts) for parts in conversations]
        assert len(set(alone)) == 16
        for count in (3, 5, 8, 16):
            chosen = range(16 - count, 16)
            together = await asyncio.gather(*(answer(client, *conversations[number]) for number in chosen))
            assert together == alone[16 - count :]


async def test_streams_and_errors(folder: Path) -> None:
    async with serving(folder) as (client, _):
        parts = (picture(64, 96, seed=0), text("?"))
        whole = (await client.post(CHAT, json=body(*parts))).json()["choices"][0]["message"]["content"]
        chunks = stream_of(await client.post(CHAT, json=body(*parts, stream=True)))
        deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]  # type: ignore[index]
        assert "".join(deltas) == whole
        thin = picture(1, 300, seed=0)
        refused, fine = await asyncio.gather(
            client.post(CHAT, json=body(text("?"), thin)), client.post(CHAT, json=body(*parts))
        )
        error = error_of(refused, 400)
        assert error["param"] == "messages[0].content[1]" and "aspect ratio" in str(error["message"])
        assert fine.json()["choices"][0]["message"]["content"] == whole
