"""Rows with images and rows of text of one vision family in a moving batch, held against solo runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.media import PreparedMedia
from chairlift.engine.models.batching import Finding
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.images import Eyes, has_vision_attention
from chairlift.engine.models.vision import SeeingModel
from chairlift.patches import MLX, MLX_LM, MLX_VLM, apply_patches
from chairlift.patches.qwen3_5 import (
    patch_qwen35_attention_for_batching,
    undo_qwen35_attention_for_batching,
)
from tests.mlx.lift import Lift, Ride, differences
from tests.mlx.parity import Parity
from tests.mlx.solo import Answer, Prompt, Solo
from tests.mlx.vision_families import (
    FAMILIES,
    IMAGE,
    VOCABULARY,
    VisionFamily,
    build,
    seeing_prompt,
    text_prompt,
)


@dataclass(slots=True)
class VisionSolo(Solo):
    """Greedy answers by mlx-vlm's own `generate_step` alone, as upstream is without our patch of Qwen3.5.

    Prompts are told apart by their tokens, so prompts with images must differ in their text.
    """

    media: dict[Prompt, PreparedMedia] = field(default_factory=dict)

    def _run(self, tokens: Prompt, count: int) -> Answer:
        from mlx_vlm.generate.ar import generate_step

        for name in ("_rope_deltas", "_position_ids"):
            if hasattr(self.model.language_model, name):
                setattr(self.model.language_model, name, None)
        media = self.media.get(tokens)
        inputs = {name: mx.array(value) for name, value in (media.inputs if media else {}).items()}
        ids = mx.array([tokens])
        pixels = inputs.pop("pixel_values", None)
        if media is not None and has_vision_attention(self.model.language_model):
            inputs["mm_token_type_ids"] = (ids == IMAGE).astype(mx.int32)
        undo_qwen35_attention_for_batching()
        steps = list(
            generate_step(
                ids, self.model, pixels, mx.ones_like(ids), max_tokens=count, temperature=0.0, **inputs
            )
        )
        patch_qwen35_attention_for_batching()
        logprobs = mx.stack([row for _, row in steps])
        best = mx.topk(logprobs, 2, axis=-1)
        first: Any = best.max(axis=-1).tolist()
        gaps: Any = (best.max(axis=-1) - best.min(axis=-1)).tolist()
        return Answer(tuple(int(token) for token, _ in steps), tuple(first), tuple(gaps))


@cache
def solo(name: str) -> VisionSolo:
    """The family's small model and its solo runs."""
    apply_patches((MLX, MLX_LM, MLX_VLM))
    return VisionSolo(build(FAMILIES[name]))


@cache
def finding(name: str) -> Finding:
    """How the engine batches the family by its own trial."""
    model = solo(name).model
    apply_patches((MLX, MLX_LM, MLX_VLM))
    return make_runner(SeeingModel(model), VOCABULARY)[0]


def runner_of(name: str) -> Any:
    found, model = finding(name), solo(name).model
    apply_patches((MLX, MLX_LM, MLX_VLM))
    batching = None if found.whole_prompts else found.batching
    return make_runner(SeeingModel(model), VOCABULARY, batching, Eyes(model))[1]


def seeing_ride(ride: Ride, prompt: tuple[Prompt, PreparedMedia]) -> Ride:
    """The ride with a prompt that has images."""
    return replace(ride, prompt=prompt[0], media=prompt[1])


def rides(family: VisionFamily) -> tuple[Ride, ...]:
    """Text rows and rows with images of several sizes, lengths 1 to 200, joined at different steps, in chunks
    (some of which cut through images), cancelled and preempted."""

    def see(before: int, sizes: Sequence[tuple[int, int]], after: int, seed: int) -> Any:
        images = [family.image(*size, seed=10 * seed + at) for at, size in enumerate(sizes)]
        return seeing_prompt(family, before, images, after, seed)

    return (
        Ride(text_prompt(9), tokens=16),
        seeing_ride(Ride((), tokens=14), see(5, [(1, 2)], 6, 1)),
        Ride(text_prompt(200), join=1, tokens=10, chunks=(64,)),
        seeing_ride(Ride((), join=2, tokens=12, chunks=(7,)), see(20, [(2, 2)], 3, 2)),
        Ride(text_prompt(1), join=3, tokens=12),
        seeing_ride(Ride((), join=3, tokens=12, chunks=(5, 9)), see(2, [(1, 1), (2, 1), (1, 3)], 40, 3)),
        seeing_ride(Ride((), join=5, tokens=12, preempt=(11,)), see(0, [(2, 3)], 1, 4)),
        Ride(text_prompt(17), join=5, tokens=14, preempt=(9,), chunks=(4,)),
        seeing_ride(Ride((), join=6, tokens=12, cancel=10), see(30, [(3, 1)], 9, 5)),
        seeing_ride(Ride((), join=7, tokens=10, chunks=(3,), cancel=9), see(4, [(2, 2)], 9, 6)),
        seeing_ride(Ride((), join=8, tokens=9, chunks=(16,)), see(100, [(1, 2)], 64, 7)),
        Ride(text_prompt(40), join=10, tokens=9),
        seeing_ride(Ride((), join=30, tokens=5), see(7, [(1, 2)], 5, 8)),
    )


ALONE = {"paligemma": "every token of a prompt sees the whole prompt"}
"""Families whose rows share no step, and why."""

LENGTHENED = "its prompt grows as images are put into it: one token becomes many"
REFUSED = {
    "granite_vision": LENGTHENED,
    "llava_next": LENGTHENED,
    "mllama": "reads images by cross attention",
}
"""Families that answer text only, and why."""

SHORT = frozenset(
    {"aya_vision", "glm4v", "idefics3", "internvl", "internvl_chat", "mistral3", "qwen3_vl_moe"}
)
"""Families that ride a short schedule."""


def short_rides(family: VisionFamily) -> tuple[Ride, ...]:
    """Two rows of text and two with images, chunked, joined later, preempted."""
    two = [family.image(1, 2, seed=51), family.image(2, 1, seed=52)]
    return (
        Ride(text_prompt(19), tokens=8, chunks=(8,)),
        seeing_ride(
            Ride((), tokens=8, chunks=(9,)), seeing_prompt(family, 4, [family.image(2, 2, seed=50)], 7, 31)
        ),
        seeing_ride(Ride((), join=2, tokens=7, preempt=(7,)), seeing_prompt(family, 1, two, 30, 32)),
        Ride(text_prompt(3), join=3, tokens=6),
    )


def measure(name: str, schedule: Sequence[Ride]) -> Parity:
    """All rides on a fresh runner over the family's small model."""
    known = solo(name)
    known.media.update({ride.prompt: ride.media for ride in schedule if ride.media is not None})
    runner = runner_of(name)
    lift = Lift(runner)
    answers = lift.run(schedule)
    missing = [
        index
        for index, (ride, samples) in enumerate(zip(schedule, answers, strict=True))
        if ride.cancel is None and len(samples) != ride.tokens
    ]
    return Parity(
        tokens=sum(map(len, answers)),
        failures=lift.failures,
        missing=tuple(missing),
        differences=tuple(differences(known, schedule, answers)),
        after=runner.stats(),
    )


def bad_media(media: PreparedMedia) -> PreparedMedia:
    """The same images with half of each row of their pixels."""
    pixels = np.asarray(media.inputs["pixel_values"])
    inputs = {**media.inputs, "pixel_values": pixels[..., : pixels.shape[-1] // 2]}
    return PreparedMedia(inputs, tuple(f"bad/{digest}" for digest in media.digests), media.tokens)
