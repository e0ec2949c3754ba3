"""Processors of vision models, each family's own, over small folders."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm")

from chairlift.engine.errors import InvalidParameter, ModelUnavailable
from chairlift.engine.media import ImageInput, PreparedMedia
from chairlift.engine.models.processor import FolderProcessor, load_processor
from chairlift.engine.models.tokenizer import load_tokenizer
from tests.engine.models.vision_folders import (
    FOLDERS,
    MEAN,
    QWEN_TEMPLATE,
    STD,
    qwen,
    write_folder,
    write_json,
)

Parts = list[dict[str, object]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vision")
    for family in FOLDERS:
        write_folder(place / family, family)
    return place


@pytest.fixture(scope="module")
def loaded(folders: Path) -> dict[str, FolderProcessor]:
    return {family: load_processor(folders / family) for family in FOLDERS}


def image(
    height: int, width: int, colour: tuple[int, int, int] = (10, 120, 250), param: str = ""
) -> ImageInput:
    pixels = np.broadcast_to(np.array(colour, dtype=np.uint8), (height, width, 3)).copy()
    return ImageInput(pixels, f"{height}x{width}:{colour}", param=param)


def noise(height: int, width: int, seed: int) -> ImageInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return ImageInput(pixels, f"{height}x{width}#{seed}")


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


IMAGE: dict[str, object] = {"type": "image"}


def user(*parts: dict[str, object]) -> Parts:
    return [{"role": "user", "content": list(parts)}]


def shown(processor: FolderProcessor, ids: list[int]) -> str:
    return str(processor._tokenizer.own.decode(ids, skip_special_tokens=False))


def tiles(rows: int, columns: int) -> str:
    """An image cut into tiles by Idefics 3 and SmolVLM, four tokens each, with the whole behind them."""
    edge, tokens = "<fake_token_around_image>", "<image>" * 4
    lines = [
        "".join(f"{edge}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    return "".join(lines) + f"\n{edge}<global-img>{tokens}{edge}"


def grid(rows: int, columns: int) -> str:
    """An image of Pixtral's."""
    return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"


def pads(count: int) -> str:
    return f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"


GEMMA = f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
QWEN = "<|im_start|>user\n{}hi {}<|im_end|>\n<|im_start|>assistant\n"
TILED = f"<|im_start|>User:{tiles(3, 4)}hi {tiles(4, 3)}<end_of_utterance>\nAssistant:"

EXPECTED: dict[str, tuple[str, tuple[int, int], dict[str, tuple[int, ...]]]] = {
    # 28 pixels a token: 60 x 100 is 2 x 4 tokens, 200 x 150 is 7 x 5.
    "qwen2_vl": (
        QWEN.format(pads(8), pads(35)),
        (8, 35),
        {"pixel_values": (172, 1176), "image_grid_thw": (2, 3)},
    ),
    "qwen2_5_vl": (
        QWEN.format(pads(8), pads(35)),
        (8, 35),
        {"pixel_values": (172, 1176), "image_grid_thw": (2, 3)},
    ),
    # 32 pixels a token: 2 x 3 and 6 x 5.
    "qwen3_vl": (
        QWEN.format(pads(6), pads(30)),
        (6, 30),
        {"pixel_values": (144, 1536), "image_grid_thw": (2, 3)},
    ),
    "qwen3_5": (
        QWEN.format(pads(6), pads(30)),
        (6, 30),
        {"pixel_values": (144, 1536), "image_grid_thw": (2, 3)},
    ),
    "gemma3": (
        f"<bos><start_of_turn>user\n{GEMMA}hi{GEMMA}<end_of_turn>\n<start_of_turn>model\n",
        (4, 4),
        {"pixel_values": (2, 3, 56, 56)},
    ),
    # 14 pixels a token of 42 x 42; images first.
    "llava": (
        f"<s>USER: {'<image>' * 9}\n{'<image>' * 9}\nhi  ASSISTANT:",
        (9, 9),
        {"pixel_values": (2, 3, 42, 42)},
    ),
    # 16 pixels a token, longer edge 128: 4 x 7, and 8 x 6 of 128 x 96.
    "pixtral": (
        f"<s>[INST]{grid(4, 7)}hi {grid(8, 6)}[/INST]",
        (28, 48),
        {"pixel_values": (2, 3, 128, 112), "image_sizes": (2, 2)},
    ),
    # 28 pixels a token: 3 x 4 and 5 x 4.
    "mistral3": (
        f"<s>[INST]{grid(3, 4)}hi {grid(5, 4)}[/INST]",
        (12, 20),
        {"pixel_values": (2, 3, 140, 112), "image_sizes": (2, 2)},
    ),
    # Tiles of 64 x 64 of 192 x 256 and 256 x 192.
    "idefics3": (
        TILED,
        (52, 52),
        {"pixel_values": (1, 26, 3, 64, 64), "pixel_attention_mask": (1, 26, 64, 64)},
    ),
    "smolvlm": (
        TILED,
        (52, 52),
        {"pixel_values": (1, 26, 3, 64, 64), "pixel_attention_mask": (1, 26, 64, 64)},
    ),
}


@pytest.mark.parametrize("family", FOLDERS)
def test_two_images_of_different_sizes(loaded: dict[str, FolderProcessor], family: str) -> None:
    expected, tokens, shapes = EXPECTED[family]
    images = [image(60, 100), image(200, 150)]
    ids, media = loaded[family].prepare(user(IMAGE, text("hi "), IMAGE), images)
    assert shown(loaded[family], ids) == expected
    assert media.tokens == tokens
    assert media.digests == (images[0].digest, images[1].digest)
    assert {name: value.shape for name, value in media.inputs.items()} == shapes
    assert all(isinstance(value, np.ndarray) for value in media.inputs.values())


@pytest.mark.parametrize("family", FOLDERS)
def test_one_image(loaded: dict[str, FolderProcessor], family: str) -> None:
    """The second of two images alone stands for as many tokens."""
    ids, media = loaded[family].prepare(user(text("what?"), IMAGE), [image(200, 150)])
    assert media.tokens == EXPECTED[family][1][1:]
    assert "what?" in shown(loaded[family], ids)


@pytest.mark.parametrize("family", FOLDERS)
def test_pixels_are_normalized_by_channel(loaded: dict[str, FolderProcessor], family: str) -> None:
    """An image of one colour is that colour everywhere, in units of the model's mean and deviation."""
    _, media = loaded[family].prepare(user(IMAGE), [image(112, 112)])
    values = media.inputs["pixel_values"]
    assert values.dtype == np.float32
    expected = (np.array([10, 120, 250]) / 255 - MEAN) / STD
    if family.startswith("qwen"):  # patches: channels, then two equal frames, then rows and columns
        found = values.reshape(len(values), 3, -1)
        np.testing.assert_allclose(found, np.broadcast_to(expected[:, None], found.shape), atol=1e-5)
    else:
        found = values.reshape(-1, 3, *values.shape[-2:])
        np.testing.assert_allclose(found, np.broadcast_to(expected[:, None, None], found.shape), atol=1e-5)


@pytest.mark.parametrize("family", FOLDERS)
def test_other_pixels_give_other_arrays_and_equal_tokens(
    loaded: dict[str, FolderProcessor], family: str
) -> None:
    one, other, again = (
        loaded[family].prepare(user(IMAGE, text("?")), [noise(64, 96, seed)]) for seed in (0, 1, 0)
    )
    assert one[0] == other[0] == again[0]
    np.testing.assert_array_equal(one[1].inputs["pixel_values"], again[1].inputs["pixel_values"])
    assert not np.array_equal(one[1].inputs["pixel_values"], other[1].inputs["pixel_values"])


@pytest.mark.parametrize("family", FOLDERS)
def test_text_alone(loaded: dict[str, FolderProcessor], family: str) -> None:
    ids, media = loaded[family].prepare([{"role": "user", "content": "Grüße"}], [])
    assert shown(loaded[family], ids).count("Grüße") == 1
    assert media == PreparedMedia()
    bos = loaded[family]._tokenizer.own.bos_token
    if bos is not None:
        assert shown(loaded[family], ids).count(bos) == 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_text_alone_is_as_the_tokenizer_has_it(
    folders: Path, loaded: dict[str, FolderProcessor], family: str
) -> None:
    messages: Parts = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    expected = load_tokenizer(folders / family).apply_chat_template(messages)
    assert loaded[family].prepare(messages, [])[0] == expected


def test_turns_with_images_keep_their_order(loaded: dict[str, FolderProcessor]) -> None:
    messages: Parts = [
        {"role": "user", "content": [IMAGE, text("a")]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [text("c"), IMAGE]},
    ]
    ids, media = loaded["qwen3_5"].prepare(messages, [image(64, 64), image(128, 64)])
    assert shown(loaded["qwen3_5"], ids) == (
        f"<|im_start|>user\n{pads(4)}a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        f"<|im_start|>user\nc{pads(8)}<|im_end|>\n<|im_start|>assistant\n"
    )
    np.testing.assert_array_equal(media.inputs["image_grid_thw"], [[1, 4, 4], [1, 8, 4]])
    assert messages[0]["content"] == [IMAGE, text("a")]


def refused(
    processor: FolderProcessor, messages: Parts, *images: ImageInput, **more: Any
) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        processor.prepare(messages, images, **more)
    return caught.value


def test_a_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    refusal = "{% if 'b' in messages | string %}{{ raise_exception('No b up here.') }}{% endif %}"
    qwen(tmp_path, "qwen2_vl", refusal + QWEN_TEMPLATE)
    processor = load_processor(tmp_path)
    for images in ([], [image(60, 60)]):
        error = refused(processor, user(*[IMAGE] * len(images), text("b")), *images)
        assert error.param == "messages" and "No b up here." in error.message


def test_a_template_without_a_system_role(loaded: dict[str, FolderProcessor]) -> None:
    processor = loaded["pixtral"]
    for images in ([], [image(60, 60)]):
        said = user(*[IMAGE] * len(images), text("b"))
        ids, media = processor.prepare([{"role": "system", "content": "a"}, *said], images)
        expected, _ = processor.prepare(user(text("a"), *[IMAGE] * len(images), text("b")), images)
        assert len(media.digests) == len(images)
        assert shown(processor, ids).replace("\n", "") == shown(processor, expected)


def test_control_tokens_in_a_text_are_text(loaded: dict[str, FolderProcessor]) -> None:
    processor = loaded["qwen2_5_vl"]
    end = processor.prepare(user(text("")), [])[0].count(258)
    for images in ([], [image(60, 60)]):
        said = user(*[IMAGE] * len(images), text("a<|im_end|>b"))
        ids, media = processor.prepare(said, images)
        assert "a<|im_end|>b" in shown(processor, ids)
        assert ids.count(258) == end and shown(processor, [258]) == "<|im_end|>"
        assert sum(media.tokens) == ids.count(261)


def test_an_image_that_the_template_leaves_out(tmp_path: Path) -> None:
    template = QWEN_TEMPLATE.replace(
        "content['type'] == 'image'", "content['type'] == 'image' and message['role'] == 'user'"
    )
    qwen(tmp_path, "qwen2_vl", template)
    messages: Parts = [{"role": "system", "content": [IMAGE]}, *user(IMAGE)]
    error = refused(load_processor(tmp_path), messages, image(60, 60), image(60, 60))
    assert error.param == "messages" and "room for 1 of this conversation's 2 images" in error.message


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|placeholder|>"])
def test_text_that_stands_for_an_image(loaded: dict[str, FolderProcessor], token: str) -> None:
    processor = loaded["qwen2_5_vl"]
    for content in (f"What is {token}?", [text(f"What is {token}?")]):
        messages: Parts = [*user(IMAGE), {"role": "user", "content": content}]
        error = refused(processor, messages, image(60, 60))
        assert error.param == "messages[1].content" and token in error.message
    assert processor.prepare([{"role": "user", "content": token}], [])[1] == PreparedMedia()


def test_an_image_of_no_use_is_named(loaded: dict[str, FolderProcessor]) -> None:
    """Qwen takes no image that is more than 200 times as long as it is wide."""
    thin = image(1, 300, param="messages[0].content[1]")
    fine = image(60, 60, param="messages[0].content[0]")
    for images in ([thin], [fine, thin], [thin, fine]):
        error = refused(loaded["qwen2_5_vl"], user(*[IMAGE] * len(images)), *images)
        assert error.param == "messages[0].content[1]"
        assert error.message.startswith("messages[0].content[1]: ") and "aspect ratio" in error.message


def test_arguments_of_the_call_are_not_the_templates(loaded: dict[str, FolderProcessor]) -> None:
    assert refused(loaded["gemma3"], user(text("a")), tokenize=True).param == "chat_template_kwargs"


def test_variables_of_the_template(tmp_path: Path) -> None:
    qwen(tmp_path, "qwen3_vl", QWEN_TEMPLATE + "{{ mood | default('none') }}{{ tools or 0 }}")
    processor = load_processor(tmp_path)
    ids, _ = processor.prepare(user(IMAGE), [image(64, 64)], tools=[{"a": 1}], mood="good")
    assert shown(processor, ids).endswith("good[{'a': 1}]")
    ids, _ = processor.prepare(user(IMAGE), [image(64, 64)], add_generation_prompt=False)
    assert shown(processor, ids).endswith("<|im_end|>\nnone0")


def test_a_template_of_strings_only(tmp_path: Path) -> None:
    qwen(
        tmp_path, "qwen2_vl", "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    )
    processor = load_processor(tmp_path)
    ids, media = processor.prepare(user(text("a"), IMAGE, text("b")), [image(56, 56)])
    assert shown(processor, ids) == f"user:a{'<|image_pad|>' * 4}\nb|" and media.tokens == (4,)


def test_no_template(tmp_path: Path) -> None:
    qwen(tmp_path, "qwen2_vl", None)
    error = refused(load_processor(tmp_path), user(IMAGE), image(56, 56))
    assert error.param == "messages" and "no chat template" in error.message


def test_from_many_threads(loaded: dict[str, FolderProcessor]) -> None:
    def ask(number: int) -> tuple[list[int], tuple[int, ...], bytes]:
        sizes = [(56 + 28 * (number % 3), 84), (112, 56)][: number % 3]
        images = [noise(*size, number % 4) for size in sizes]
        family = ("qwen2_5_vl", "idefics3", "gemma3")[number % 2]
        ids, media = loaded[family].prepare(user(*[IMAGE] * len(images), text("?" * (number % 5))), images)
        pixels = media.inputs["pixel_values"].tobytes() if images else b""
        return ids, media.tokens, pixels

    alone = [ask(number) for number in range(24)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(24))) == alone


def test_text_does_not_wait_for_images(folders: Path) -> None:
    processor = load_processor(folders / "qwen2_vl")
    own, begun, go_on = processor._processor.image_processor, threading.Event(), threading.Event()

    class Slow:
        merge_size = own.merge_size

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            begun.set()
            assert go_on.wait(30)
            return own(*arguments, **options)

    processor._processor.image_processor = Slow()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(processor.prepare, user(IMAGE), [image(56, 56)])
        assert begun.wait(30)
        assert processor.prepare(user(text("a")), [])[0]
        go_on.set()
        assert waiting.result()[1].tokens == (4,)


def test_folders_that_are_no_vision_models(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        load_processor(tmp_path / "nowhere")
    qwen(tmp_path, "qwen2_vl")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable) as caught:
        load_processor(tmp_path)
    assert "\n" not in caught.value.message


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    write_folder(tmp_path, "smolvlm")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for file in ("config", "tokenizer_config", "preprocessor_config", "processor_config"):
        told = json.loads((tmp_path / f"{file}.json").read_text())
        evil = dict.fromkeys(("AutoProcessor", "AutoImageProcessor", "AutoConfig"), "evil.Evil")
        told["auto_map"] = {**evil, "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        write_json(tmp_path, **{file: told})
    processor = load_processor(tmp_path)
    assert processor.prepare(user(IMAGE), [image(64, 64)])[1].tokens
    assert not (tmp_path / "ran").exists()
