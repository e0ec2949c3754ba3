"""Rows with images and rows of text in one moving batch answer as they do alone, family by family.

Float32, greedy, exact tokens and log probabilities, against mlx-vlm's own `generate_step`.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.encoded import EncodedImages
from chairlift.engine.models.image_rows import Encoded
from chairlift.engine.models.images import Eyes
from chairlift.engine.models.vision import SeeingModel
from chairlift.engine.plan import NewRow, Span, StepPlan
from chairlift.engine.runner import MlxRunner
from tests.mlx.lift import GREEDY, Lift, Ride, differences
from tests.mlx.test_parity import assert_exact
from tests.mlx.vision_families import FAMILIES, VOCABULARY, seeing_prompt, text_prompt
from tests.mlx.vision_parity import (
    ALONE,
    REFUSED,
    SHORT,
    bad_media,
    finding,
    measure,
    rides,
    runner_of,
    seeing_ride,
    short_rides,
    solo,
)
from tests.patches.test_qwen3_5_step import reads_counted

BATCHED = {
    "qwen2_vl": Batching.FLAT,
    "qwen2_5_vl": Batching.FLAT,
    "qwen3_vl": Batching.FLAT,
    "qwen3_5": Batching.HYBRID,
    "qwen3_5_moe": Batching.HYBRID,
    "gemma3": Batching.FLAT,
    "llava": Batching.FLAT,
    "pixtral": Batching.FLAT,
    "mistral3": Batching.FLAT,
    "smolvlm": Batching.FLAT,
    "idefics3": Batching.FLAT,
    "internvl_chat": Batching.FLAT,
    "lfm2_vl": Batching.HYBRID,
    "kimi_vl": Batching.FLAT,
    "aya_vision": Batching.FLAT,
    "qwen3_vl_moe": Batching.FLAT,
    "glm4v": Batching.FLAT,
    "internvl": Batching.FLAT,
    "gemma4": Batching.FLAT,
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_rows_answer_as_alone(name: str) -> None:
    assert finding(name).batching is BATCHED.get(name, Batching.SOLO)
    assert (name in ALONE) == (finding(name).batching is Batching.SOLO)
    family = FAMILIES[name]
    assert_exact(measure(name, short_rides(family) if name in SHORT else rides(family)))


def test_a_long_row_of_qwen3_5() -> None:
    family = FAMILIES["qwen3_5"]
    image = family.image(3, 4, seed=1)
    schedule = (
        seeing_ride(Ride((), tokens=6, chunks=(512,)), seeing_prompt(family, 900, [image], 1100, seed=70)),
        Ride(text_prompt(20), join=1, tokens=8),
        seeing_ride(Ride((), tokens=8, join=2), seeing_prompt(family, 5, [family.image(2, 2)], 2, seed=71)),
    )
    assert len(schedule[0].prompt) > 2000
    assert_exact(measure("qwen3_5", schedule))


def delta_of(name: str, ride: Ride) -> int:
    assert ride.media is not None
    row = Eyes(solo(name).model).row(ride.prompt, ride.media)
    row.encode()
    assert row.encoded
    return row.delta


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_the_delta_of_another_row_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = [ride for ride in rides(FAMILIES[name]) if ride.media is not None]
    assert len({delta_of(name, ride) for ride in schedule}) > 2
    monkeypatch.setattr("chairlift.engine.residents.Resident.delta", 0)
    assert measure(name, schedule).differences != ()


def test_an_image_in_place_of_another_would_be_seen() -> None:
    name = "llava"
    family = FAMILIES[name]
    ride = seeing_ride(Ride((), tokens=6), seeing_prompt(family, 3, [family.image(seed=1)], 3, seed=1))
    known = solo(name)
    known.media[ride.prompt] = family.media([family.image(seed=2)])
    known._answers.pop(ride.prompt, None)
    answers = Lift(runner_of(name)).run([ride])
    assert differences(known, [ride], answers) != []
    del known._answers[ride.prompt], known.media[ride.prompt]


# Faults


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "gemma3"])
def test_an_image_that_cannot_be_encoded_fails_alone(name: str) -> None:
    family = FAMILIES[name]
    schedule = list(short_rides(family))
    prompt, media = seeing_prompt(family, 4, [family.image(2, 2, seed=3)], 3, seed=90)
    _, two = seeing_prompt(family, 4, [family.image(2, 2, seed=3), family.image(1, 1, seed=4)], 3, seed=91)
    faulty = [
        Ride(prompt, join=2, tokens=5, media=bad_media(media)),
        Ride(prompt, join=2, tokens=5, media=replace(media, inputs={})),
        Ride(prompt, join=3, tokens=5, media=two),
        Ride(text_prompt(12), join=3, tokens=5, media=media),
    ]
    known = solo(name)
    known.media.update({ride.prompt: ride.media for ride in schedule if ride.media is not None})
    lift = Lift(runner_of(name))
    answers = lift.run([*schedule, *faulty])
    first = len(schedule)
    assert lift.failures == {
        first: "The images of the prompt could not be encoded.",
        first + 1: "The images of the prompt came without pixels.",
        first + 2: f"The prompt holds 4 image tokens where its images take {sum(two.tokens)}.",
        first + 3: "The prompt holds 0 image tokens where its images take 4.",
    }
    assert differences(known, schedule, answers[:first]) == []
    assert [len(row) for row in answers[:first]] == [ride.tokens for ride in schedule]


def test_a_model_without_eyes_fails_the_row() -> None:
    model = SeeingModel(solo("llava").model)
    family = FAMILIES["llava"]
    _, runner = make_runner(model, VOCABULARY, Batching.FLAT)
    lift = Lift(runner)
    prompt, media = seeing_prompt(family, 3, [family.image()], 3)
    answers = lift.run([Ride(prompt, media=media), Ride(text_prompt(9), tokens=3)])
    assert lift.failures == {0: "This model takes no images."}
    assert len(answers[1]) == 3


def test_a_family_whose_images_are_refused_answers_text() -> None:
    family = FAMILIES["llava_next"]
    prompt, media = seeing_prompt(family, 3, [family.image()], 3)
    lift = Lift(runner_of("llava_next"))
    schedule = [Ride(text_prompt(9), tokens=4), Ride(prompt, media=media), Ride(text_prompt(3), tokens=4)]
    answers = lift.run(schedule)
    assert lift.failures == {1: "This model lengthens a prompt by its images, which is not supported."}
    assert differences(solo("llava_next"), schedule[::2], answers[::2]) == []


# Encoding as a piece of work of its own


class Tower:
    """Counts the images that a model's vision tower sees."""

    def __init__(self, model: object, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        tower = type(model.vision_tower)  # type: ignore[attr-defined]
        original = tower.__call__

        def call(this: object, pixels: mx.array, *args: object, **kwargs: object) -> object:
            self.calls.append(len(pixels))
            return original(this, pixels, *args, **kwargs)

        monkeypatch.setattr(tower, "__call__", call)


def test_one_image_a_step_while_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    family, model = FAMILIES["llava"], solo("llava").model
    eyes = Eyes(model)
    eyes.by_image = True
    runner = make_runner(SeeingModel(model), VOCABULARY, Batching.FLAT, eyes)[1]
    prompt, media = seeing_prompt(family, 3, [family.image(seed=1), family.image(seed=2)], 3)
    tower = Tower(model, monkeypatch)
    plans = [
        StepPlan(1, admit=(NewRow(1, GREEDY, 1),), prefill=(Span(1, 0, (1, 2, 3), True),)),
        StepPlan(2, admit=(NewRow(2, GREEDY, 2, 0, media, prompt),), decode=(1,), encode=(2,)),
        StepPlan(3, decode=(1,), encode=(2,)),
        StepPlan(4, decode=(1,), prefill=(Span(2, 0, prompt, True),)),
        StepPlan(5, release=(1, 2)),
    ]
    results = []
    seen = []
    for plan in plans:
        results.append(runner.step(plan))
        seen.append(len(tower.calls))
    assert seen == [0, 1, 2, 2, 2]
    told = [result for result in results if result is not None]
    assert [result.encoded for result in told] == [frozenset(), frozenset(), frozenset({2}), frozenset()]
    assert [sorted(result.samples) for result in told] == [[1], [1], [1], [1, 2]]


def test_an_image_seen_before_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    family, model = FAMILIES["qwen2_vl"], solo("qwen2_vl").model
    eyes = Eyes(model)
    first, second = family.image(2, 2, seed=1), family.image(1, 2, seed=2)
    _, media = prompt_one = seeing_prompt(family, 3, [first], 3)
    row = eyes.row(prompt_one[0], media)
    row.encode()
    tower = Tower(model, monkeypatch)
    prompt, media = seeing_prompt(family, 9, [second, first, second], 5)
    row = eyes.row(prompt, media)
    row.encode()
    assert tower.calls == [second.arrays["pixel_values"].shape[0]]
    row.encode()  # the third is the second, which is kept by now
    assert row.encoded
    assert len(tower.calls) == 1
    whole = eyes.features(prompt, media.inputs)
    assert mx.allclose(row.told(0, prompt)["inputs_embeds"], whole["inputs_embeds"], atol=1e-5).item()
    assert mx.array_equal(row.told(3, prompt[3:])["position_ids"], whole["position_ids"][..., 3:]).item()


def test_what_is_kept_is_bounded() -> None:
    family, model = FAMILIES["llava"], solo("llava").model
    kept: EncodedImages[Encoded] = EncodedImages(2 * 16 * 64 * 4)
    eyes = Eyes(model, kept)
    for seed in range(4):
        prompt, media = seeing_prompt(family, 2, [family.image(seed=seed)], 2)
        row = eyes.row(prompt, media)
        row.encode()
        assert row.encoded
    assert (len(kept), kept.nbytes) == (2, 2 * 16 * 64 * 4)


# What a step reads of the device


def test_a_decode_step_reads_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["qwen3_5"]
    runner: MlxRunner = runner_of("qwen3_5")
    rows = [
        (text_prompt(9), None),
        seeing_prompt(family, 3, [family.image(2, 2, seed=1)], 4),
        seeing_prompt(family, 0, [family.image(1, 3, seed=2)], 8),
    ]
    admit = tuple(
        NewRow(row, GREEDY, row, 0, media, prompt if media else ())
        for row, (prompt, media) in enumerate(rows)
    )
    prefill = tuple(Span(row, 0, prompt, True) for row, (prompt, _) in enumerate(rows))
    runner.step(StepPlan(1, admit=admit, prefill=prefill))
    decode = tuple(range(len(rows)))
    runner.step(StepPlan(2, decode=decode))
    with reads_counted(monkeypatch) as reads:
        flight = runner._launch(StepPlan(3, decode=decode))
        assert flight is not None
        # The launch itself; nothing waits for it.
        assert reads == ["async_eval"]
    runner._last = flight
    runner.step(StepPlan(4, release=decode))
    assert runner.stats().rows == 0


def test_nothing_is_left_on_the_model() -> None:
    model = solo("qwen2_vl").model.language_model
    for name in ("_rope_deltas", "_position_ids"):
        setattr(model, name, None)
    prompt, media = seeing_prompt(FAMILIES["qwen2_vl"], 3, [FAMILIES["qwen2_vl"].image(2, 2)], 4)
    lift = Lift(runner_of("qwen2_vl"))
    lift.run([Ride(prompt, media=media, tokens=3), Ride(text_prompt(5), tokens=3)])
    assert model._rope_deltas is None
    assert model._position_ids is None


def test_images_whose_inputs_cannot_be_told_apart_are_encoded_together_and_kept_apart() -> None:
    family, model = FAMILIES["smolvlm"], solo("smolvlm").model
    eyes = Eyes(model)
    eyes.by_image = True
    images = [family.image(1, 2, seed=1), family.image(2, 2, seed=2)]
    prompt, media = seeing_prompt(family, 2, images, 2)
    row = eyes.row(prompt, replace(media, inputs={**media.inputs, "rows": np.array([[1, 2]])}))
    row.encode()
    assert row.encoded
    assert [("image", image.digest) in eyes.kept for image in images] == [True, True]
    again, media = seeing_prompt(family, 9, images[1:], 2)
    row = eyes.row(again, media)
    row.encode()
    whole = eyes.features(again, media.inputs)
    assert mx.allclose(row.told(0, again)["inputs_embeds"], whole["inputs_embeds"], atol=1e-5).item()


def test_features_that_depend_on_the_place_of_an_image_are_kept_by_prompt() -> None:
    """Upstream puts PaliGemma's features at the places that they would have at the start of a prompt."""
    family, model = FAMILIES["paligemma"], solo("paligemma").model
    for before, by_image in ((3, False), (0, True)):
        eyes = Eyes(model)
        prompt, media = seeing_prompt(family, before, [family.image(seed=1)], 4)
        row = eyes.row(prompt, media)
        row.encode()
        assert eyes.by_image is by_image
        whole = eyes.features(prompt, media.inputs)
        assert mx.array_equal(row.told(0, prompt)["inputs_embeds"], whole["inputs_embeds"]).item()


def test_tokens_of_an_image_see_each_other_where_the_model_is_built_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = [ride for ride in rides(FAMILIES["gemma4"]) if ride.media is not None]
    monkeypatch.setattr("chairlift.engine.models.images.has_vision_attention", lambda _: False)
    assert measure("gemma4", schedule).differences != ()
