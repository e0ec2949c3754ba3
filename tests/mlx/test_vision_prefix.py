"""Rows with images that begin with kept prefixes answer as if they had computed them, family by family."""

from __future__ import annotations

import pytest

from chairlift.engine.models.image_prefix import Example, with_images
from chairlift.engine.models.images import Eyes
from chairlift.engine.models.vision import SeeingModel
from chairlift.engine.prefix.images import NamedPrompt
from tests.mlx.prefix_server import TOKENS
from tests.mlx.vision_families import FAMILIES, seeing_prompt, text_prompt
from tests.mlx.vision_parity import solo
from tests.mlx.vision_prefix import Pair, conversation, seeing_runner

ANYWHERE, CHECKPOINTS, WHOLE = "anywhere", "checkpoints", "whole images"
KINDS = {
    "llava": ANYWHERE,
    "qwen3_vl": ANYWHERE,
    "smolvlm": ANYWHERE,
    "qwen3_5": CHECKPOINTS,
    "gemma3": CHECKPOINTS,
    "gemma4": WHOLE,
}
"""Where a row with images may begin. All other families are held in docs/models.md."""


@pytest.mark.parametrize("name", KINDS)
def test_what_is_taken_over_answers_as_what_is_computed(name: str) -> None:
    found = conversation(name)
    assert found.differing == ()
    kind, length, more = (
        KINDS[name],
        len(found.first.request.prompt_token_ids),
        len(found.turn.request.prompt_token_ids),
    )
    assert found.first.cached == 0
    assert found.again.cached == (length - 1 if kind == ANYWHERE else (length - 1) // 8 * 8)
    assert found.turn.cached == length + TOKENS - 1, "behind the answer: its last token was never fed"
    assert found.more.cached == (0 if kind == WHOLE else more + TOKENS - 1)
    assert found.other.cached == {ANYWHERE: found.place, CHECKPOINTS: 128, WHOLE: 0}[kind]


def test_another_image_taken_for_the_first_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "chairlift.engine.prefix.prefixes.name_images", lambda prompt, media, tokens: NamedPrompt(prompt)
    )
    found = conversation("llava")
    assert found.other.cached > found.place
    assert 4 in found.differing


def test_images_that_are_taken_over_are_not_encoded() -> None:
    family, pair = FAMILIES["qwen3_vl"], Pair("qwen3_vl")
    first, second = family.image(2, 2, seed=1), family.image(1, 2, seed=2)
    prompt, _ = seeing_prompt(family, 20, [first], 20)
    pair.ask(prompt, [first])
    pair.eyes.kept.clear()
    pair.ask(prompt, [first])
    assert len(pair.eyes.kept) == 0
    pair.ask([*prompt, *second.tokens, *text_prompt(5)], [first, second])
    assert ("image", second.digest) in pair.eyes.kept and len(pair.eyes.kept) == 1
    assert pair.differing() == []


def test_a_model_that_sees_a_prompt_as_a_whole_keeps_none() -> None:
    assert seeing_runner("paligemma")[0].prefix is None


def test_what_is_restored_otherwise_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    family, model = FAMILIES["qwen2_5_vl"], solo("qwen2_5_vl").model
    runner, eyes = seeing_runner("qwen2_5_vl")
    assert runner.prefix is not None and runner.prefix.image_tokens
    example = Example(*seeing_prompt(family, 9, [family.image(2, 3)], 8))
    seeing = SeeingModel(model)
    plain = type(runner.prefix)(16, 1)
    assert with_images(plain, seeing, eyes, seeing.make_cache, example).image_tokens
    assert len(eyes.kept) == 0
    monkeypatch.setattr(Eyes, "whole_to", lambda this, tokens: len(tokens))
    assert with_images(plain, seeing, eyes, seeing.make_cache, example) == plain
    monkeypatch.undo()
    original = Eyes.row

    def off_by_one(this: Eyes, prompt: tuple[int, ...], media: object, held: int = 0) -> object:
        row = original(this, prompt, media, held)  # type: ignore[arg-type]
        if held:
            row._find_positions()
            row._positions = row._positions + 1
            row._find_positions = lambda: None  # type: ignore[method-assign]
        return row

    monkeypatch.setattr(Eyes, "row", off_by_one)
    assert with_images(plain, seeing, eyes, seeing.make_cache, example) == plain
    eyes.by_image = False
    monkeypatch.setattr(Eyes, "row", original)
    assert with_images(plain, seeing, eyes, seeing.make_cache, example) == plain
