"""A bound on the prepared images of all requests together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from chairlift.engine.errors import QueueFull
from chairlift.engine.media import ImageInput, PreparedMedia
from chairlift.server.media.budget import MediaBudget
from chairlift.server.settings import MediaSettings, ServerSettings
from tests.fakes import FakeRunner
from tests.server.harness import error_of, lift
from tests.server.media.pictures import FakeProcessor, data_uri, encoded, gradient, image_part, user

PICTURE = user(image_part(data_uri(encoded(gradient()))))


def media(*sizes: int) -> PreparedMedia:
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes]
    return PreparedMedia({"pixel_values": arrays[0], "more": arrays[1:], "other": "text"}, ("a",), (1,))


def test_counted_while_they_live() -> None:
    budget = MediaBudget(100)
    first, second = media(10, 20, 30), media(40)
    budget.take(first)
    assert budget.used() == 60
    budget.take(second)
    assert budget.used() == 100
    with pytest.raises(QueueFull):
        budget.take(media(1))
    assert budget.used() == 100
    pixels = first.inputs["pixel_values"]
    del first
    assert budget.used() == 50  # 10 of it are still held
    view = pixels[2:]
    del pixels
    assert budget.used() == 50
    del view
    assert budget.used() == 40
    budget.take(media(60))  # and gone at once
    assert budget.used() == 40
    del second
    assert budget.used() == 0


def test_one_request_alone_may_exceed_it() -> None:
    budget = MediaBudget(100)
    large = media(500)
    budget.take(large)
    with pytest.raises(QueueFull):
        budget.take(media(1))
    del large
    budget.take(media(1))


class Heavy(FakeProcessor):
    """Prepares a thousand bytes for each image."""

    def prepare(
        self, messages: list[dict[str, object]], images: Sequence[ImageInput], **more: object
    ) -> tuple[list[int], PreparedMedia]:
        ids, prepared = super().prepare(messages, images)
        inputs = {"pixel_values": np.zeros(1000 * len(images), dtype=np.uint8)}
        return ids, PreparedMedia(inputs, prepared.digests, prepared.tokens)


async def test_what_does_not_fit_beside_others_comes_back_later() -> None:
    runner = FakeRunner()
    settings = ServerSettings(media=MediaSettings(max_prepared_bytes=2000))
    async with lift(runner, processor=Heavy(), settings=settings) as server:
        runner.close_gate()
        running = [asyncio.ensure_future(server.chat(messages=PICTURE, max_tokens=2)) for _ in range(2)]
        while server.engine.stats().waiting + server.engine.stats().running < 2:
            await asyncio.sleep(0)
        refused = await server.chat(messages=PICTURE, max_tokens=2)
        error = error_of(refused, 429)
        assert error["code"] == "queue_full" and refused.headers["retry-after"] == "5"
        runner.open_gate()
        assert [(await reply).status_code for reply in running] == [200, 200]
        await server.until_idle()
        runner.plans.clear()  # the fake remembers what it was given
        runner.rows.clear()
        running.clear()
        assert (await server.chat(messages=PICTURE, max_tokens=2)).status_code == 200


async def test_answers_to_one_conversation_share_its_images() -> None:
    settings = ServerSettings(media=MediaSettings(max_prepared_bytes=1000))
    async with lift(processor=Heavy(), settings=settings) as server:
        reply = await server.chat(messages=PICTURE, max_tokens=2, n=3)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 3
