"""Image parts in chats, over a fake model that takes images."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from chairlift.engine.errors import InvalidParameter
from chairlift.server.settings import MediaSettings, ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.harness import Lift, error_of, lift, stream_of
from tests.server.media.host import host, ok
from tests.server.media.pictures import (
    FakeProcessor,
    data_uri,
    encoded,
    gradient,
    image_part,
    text,
    user,
)

FIRST, SECOND = gradient(4, 5), gradient(7, 3)
A, B = data_uri(encoded(FIRST)), data_uri(encoded(SECOND))


async def answer_to(server: Lift, *parts: object) -> str:
    response = await server.chat(messages=user(*parts), max_tokens=12)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "part",
    [
        image_part(A),
        image_part(A, detail="auto"),
        image_part(A, detail="high"),
        image_part(A, detail=None),
        {"type": "image_url", "image_url": A},
    ],
)
async def test_an_image_reaches_the_model(part: dict[str, object]) -> None:
    processor, runner = FakeProcessor(), FakeRunner(answering("A gradient."))
    async with lift(runner, processor=processor) as server:
        response = await server.chat(messages=user(text("What is this?"), part))
        assert response.json()["choices"][0]["message"]["content"] == "A gradient."
    [(messages, [image])] = processor.calls
    assert messages == [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]}
    ]
    np.testing.assert_array_equal(image.pixels, FIRST)
    assert image.param == "messages[0].content[1]"
    [new] = [new for plan in runner.plans for new in plan.admit if new.media is not None]
    assert new.media is not None and new.media.digests == (image.digest,) and new.media.tokens == (20,)


async def test_usage_counts_image_tokens() -> None:
    async with lift(processor=FakeProcessor()) as server:
        plain = await server.chat(messages=user(text("ab")), max_tokens=1)
        one = await server.chat(messages=user(text("ab"), image_part(A)), max_tokens=1)
        two = await server.chat(messages=user(image_part(A), text("ab"), image_part(B)), max_tokens=1)
        counts = [reply.json()["usage"]["prompt_tokens"] for reply in (plain, one, two)]
        assert counts == [counts[0], counts[0] + 4 * 5, counts[0] + 4 * 5 + 7 * 3]
        assert two.json()["usage"]["total_tokens"] == counts[2] + 1
        chunks = stream_of(
            await server.chat(
                messages=user(text("ab"), image_part(A)),
                max_tokens=1,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        usage = chunks[-1]["usage"]
        assert isinstance(usage, dict) and usage["prompt_tokens"] == counts[1]


async def test_the_answer_is_the_images_own() -> None:
    """Same prompt and image: same answer. Same prompt, other image: another answer; at once as one by one."""
    async with lift(processor=FakeProcessor()) as server:
        ask = text("What is this?")
        alone = [await answer_to(server, ask, image_part(url)) for url in (A, B, A)]
        plain = await answer_to(server, ask)
        assert alone[0] == alone[2] and len({*alone, plain}) == 3
        together = await asyncio.gather(
            *(answer_to(server, ask, image_part(url)) for url in (A, B, A, B)), answer_to(server, ask)
        )
        assert together == [alone[0], alone[1], alone[0], alone[1], plain]


async def test_images_across_messages_keep_their_order() -> None:
    processor = FakeProcessor()
    async with lift(processor=processor) as server:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [image_part(B), text("this"), image_part(A)]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": [text("and"), text("this"), image_part(B)]},
        ]
        assert (await server.chat(messages=messages, max_tokens=1)).status_code == 200
    [(rendered, images)] = processor.calls
    assert [image.param for image in images] == [
        "messages[1].content[0]",
        "messages[1].content[2]",
        "messages[3].content[2]",
    ]
    assert images[0].digest == images[2].digest != images[1].digest
    assert [message["content"] for message in rendered] == [
        "Be brief.",
        [{"type": "image"}, {"type": "text", "text": "this"}, {"type": "image"}],
        "A cat.",
        [{"type": "text", "text": "and"}, {"type": "text", "text": "this"}, {"type": "image"}],
    ]


async def test_a_chat_without_images_goes_through_the_models_own_processor() -> None:
    processor, runner = FakeProcessor(), FakeRunner()
    async with lift(runner, processor=processor) as server:
        messages = [{"role": "user", "content": [text("a"), text("b")]}]
        assert (await server.chat(messages=messages, max_tokens=1)).status_code == 200
    assert processor.calls == [([{"role": "user", "content": "a\nb"}], ())]
    assert all(new.media is None for plan in runner.plans for new in plan.admit)


async def test_a_text_model_says_that_it_takes_text_only() -> None:
    async with lift() as server:
        error = error_of(await server.chat(messages=user(text("What?"), image_part(A))), 400)
        assert (error["param"], error["code"]) == ("messages[0].content[1]", "unsupported_value")
        assert error["message"] == "messages[0].content[1] is an image, and org/fake takes text only."


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,AAAA", "http://127.0.0.1:9/a.png", "file:///a.png", "?"]
)
async def test_what_is_wrong_with_an_image_names_its_part(url: str) -> None:
    async with lift(processor=FakeProcessor()) as server:
        messages = [{"role": "user", "content": "a"}, *user(image_part(A), image_part(url))]
        error = error_of(await server.chat(messages=messages), 400)
        assert (error["param"], error["code"]) == ("messages[1].content[1]", "invalid_image")
        assert (await server.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": None}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": 5}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url"),
        (image_part(A, detail="huge"), "messages[0].content[0].image_url.detail"),
        (image_part(A, width=5), "messages[0].content[0].image_url.width"),
        ({**image_part(A), "size": 5}, "messages[0].content[0].size"),
    ],
)
async def test_parts_of_a_wrong_form(part: dict[str, object], param: str) -> None:
    async with lift(processor=FakeProcessor()) as server:
        assert error_of(await server.chat(messages=user(part)), 400)["param"] == param


@pytest.mark.parametrize("kind", ["video_url", "video", "input_audio", "audio_url", "file"])
async def test_video_audio_and_files_are_refused_by_name(kind: str) -> None:
    async with lift(processor=FakeProcessor()) as server:
        error = error_of(await server.chat(messages=user(image_part(A), {"type": kind, kind: {}})), 400)
        assert (error["param"], error["code"]) == ("messages[0].content[1]", "unsupported_parameter")
        assert str(error["message"]).startswith(f"{kind} parts are not supported")


async def test_what_the_processor_refuses() -> None:
    refused = InvalidParameter("messages[0].content[1]", "messages[0].content[1]: too thin.")
    async with lift(processor=FakeProcessor(refused)) as server:
        error = error_of(await server.chat(messages=user(text("a"), image_part(A))), 400)
        assert (error["param"], error["message"]) == (refused.param, refused.message)
    async with lift(processor=FakeProcessor(InvalidParameter("chat_template_kwargs", "No."))) as server:
        assert error_of(await server.chat(), 400)["param"] == "messages"
    async with lift(processor=FakeProcessor(RuntimeError("secret"))) as server:
        response = await server.chat()
        assert error_of(response, 400)["param"] == "messages" and "secret" not in response.text


async def test_images_count_against_the_context() -> None:
    async with lift(processor=FakeProcessor(), context_length=60) as server:
        assert (await server.chat(messages=user(image_part(A)), max_tokens=1)).status_code == 200
        error = error_of(await server.chat(messages=user(*[image_part(A)] * 3), max_tokens=1), 400)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_the_operators_limits() -> None:
    media = MediaSettings(max_images=1, allow_private=True, max_bytes=2000)
    async with host(lambda path: ok(encoded(FIRST), "Content-Type: image/png")) as web:
        async with lift(processor=FakeProcessor(), settings=ServerSettings(media=media)) as server:
            assert (await server.chat(messages=user(image_part(web.url())), max_tokens=1)).status_code == 200
            error = error_of(await server.chat(messages=user(*[image_part(A)] * 2)), 400)
            assert error["param"] == "messages[0].content[1]"
        closed = ServerSettings(media=replace(media, allow_private=False))
        async with lift(processor=FakeProcessor(), settings=closed) as server:
            assert "public" in str(error_of(await server.chat(messages=user(image_part(web.url()))), 400))


async def test_models_tell_what_they_take() -> None:
    async with lift(processor=FakeProcessor()) as server:
        [card] = (await server.client.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text", "image"]
