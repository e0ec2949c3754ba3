"""Images of Anthropic's form, over a fake model that takes images."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from anthropic import AsyncAnthropic

from chairlift.server.settings import MediaSettings, ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.anthropic.asking import COUNT, MESSAGES_PATH, ask, refusal
from tests.server.harness import MODEL, lift, on_socket
from tests.server.media.host import host, ok
from tests.server.media.pictures import FakeProcessor, encoded, gradient

FIRST, SECOND = gradient(4, 5), gradient(7, 3)


def block(picture: np.ndarray, media_type: str = "image/png") -> dict[str, object]:
    data = base64.b64encode(encoded(picture)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def user(*content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(content)}]


async def test_an_image_from_the_sdk_reaches_the_model(tmp_path: Path) -> None:
    """The SDK reads the file and sends it in base64."""
    file = tmp_path / "a.png"
    file.write_bytes(encoded(FIRST))
    processor = FakeProcessor()
    async with (
        lift(FakeRunner(answering("A gradient.")), processor=processor) as server,
        on_socket(server.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        message = await client.messages.create(
            model=MODEL,
            max_tokens=50,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": file},
                        },
                    ],
                }
            ],
        )
    assert message.content[0].type == "text" and message.content[0].text == "A gradient."
    [(rendered, [image])] = processor.calls
    assert rendered == [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]}
    ]
    np.testing.assert_array_equal(image.pixels, FIRST)


async def test_images_in_messages_and_results_keep_their_order() -> None:
    processor = FakeProcessor()
    settings = ServerSettings(media=MediaSettings(allow_private=True))
    async with (
        host(lambda path: ok(encoded(FIRST), "Content-Type: image/png")) as web,
        lift(processor=processor, settings=settings) as server,
    ):
        fetched = {"type": "image", "source": {"type": "url", "url": web.url()}}
        call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        result = {
            "type": "tool_result",
            "tool_use_id": "1",
            "content": [block(SECOND), {"type": "text", "text": "t"}],
        }
        messages = [
            *user(fetched),
            {"role": "assistant", "content": [call]},
            *user(result, block(FIRST)),
        ]
        response = await ask(server, messages=messages, max_tokens=1)
        assert response.status_code == 200, response.text
        count = await ask(server, COUNT, messages=messages)
        assert count.json()["input_tokens"] == response.json()["usage"]["input_tokens"]
    rendered, images = processor.calls[0]
    assert [(message["role"], message["content"]) for message in rendered] == [
        ("user", [{"type": "image"}]),
        ("assistant", ""),
        ("tool", "t"),
        ("user", [{"type": "image"}, {"type": "image"}]),
    ]
    for image, picture in zip(images, (FIRST, SECOND, FIRST), strict=True):
        np.testing.assert_array_equal(image.pixels, picture)


@pytest.mark.parametrize("path", [MESSAGES_PATH, COUNT])
async def test_an_image_at_fault_is_told_of_at_its_own_place(path: str) -> None:
    async with lift(processor=FakeProcessor()) as server:
        call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [block(FIRST, "image/jpeg")]}
        messages = [
            *user({"type": "text", "text": "a"}),
            {"role": "assistant", "content": [call]},
            *user(result),
        ]
        error = refusal(await ask(server, path, system="s", messages=messages), 400)
    assert error["type"] == "invalid_request_error"
    assert str(error["message"]).startswith("messages[2].content[0].content[0]: the image is stated to be")
