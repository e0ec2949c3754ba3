"""Whether prefixes of prompts with images can be kept, found by trying it on the model itself.

A small image in a short prompt: what is restored from its middle has to go on as what was computed. Runs on
the MLX thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.pages import PageFormat
from chairlift.engine.media import ImageInput, MediaProcessor, PreparedMedia
from chairlift.engine.models.batching import TOLERANCE
from chairlift.engine.models.images import Eyes
from chairlift.engine.prefix.images import name_images
from chairlift.engine.prefix.vocabulary import PrefixSpec

log = logging.getLogger(__name__)

SIZE = (64, 96)
"""Of the trial's image, height and width in pixels."""
BEFORE, BEHIND = "One chair of the lift after the other", "goes up. What is to be seen?"


@dataclass(frozen=True, slots=True)
class Example:
    """A short prompt with an image, as the model's processor prepares it."""

    prompt: tuple[int, ...]
    media: PreparedMedia


def example_of(processor: MediaProcessor | None) -> Example | None:
    """None where there is no processor, or it has no room for an image in a conversation of one message."""
    if processor is None:
        return None
    pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    image = ImageInput(pixels, hashlib.sha256(pixels.tobytes()).hexdigest())
    parts = [{"type": "text", "text": BEFORE}, {"type": "image"}, {"type": "text", "text": BEHIND}]
    try:
        prompt, media = processor.prepare([{"role": "user", "content": parts}], [image])
    except Exception as error:
        log.info("no example of a prompt with an image: %s", error)
        return None
    return Example(tuple(prompt), media)


def with_images(
    spec: PrefixSpec,
    model: Callable[..., mx.array],
    eyes: Eyes,
    make_cache: Callable[[], list[Any]],
    example: Example,
) -> PrefixSpec:
    """The same for a model that sees, and with `image_tokens` if its prompts with images can be kept, too."""
    try:
        return _tried(spec, _Trial(model, eyes, make_cache, example))
    except Exception as error:
        log.warning("prefixes with images are not kept: trying it failed (%s)", type(error).__name__)
        log.debug("the trial", exc_info=True)
        return spec
    finally:
        eyes.kept.clear()


def _tried(spec: PrefixSpec, trial: _Trial) -> PrefixSpec:
    tokens = tuple(int(token) for token in trial.eyes.image_tokens)
    named = name_images(trial.prompt, trial.media, tokens)
    if named is None or not trial.eyes.by_image:
        log.info("prefixes with images are not kept: what the model sees of one depends on the prompt")
        return spec
    if trial.whole_to == len(trial.prompt):
        log.info("prefixes with images are not kept: the model takes such prompts in one piece")
        return spec
    last = named.seen_to
    cuts = (last + 1,) if trial.whole_to else (last - 1, last + 1)
    for cut in cuts:
        if not trial.agrees(min(cut, len(trial.prompt) - 1)):
            log.warning("prefixes with images are not kept: a restored one goes on differently")
            return spec
    return replace(spec, image_tokens=tokens, whole_images=trial.whole_to > 0)


class _Trial:
    def __init__(
        self,
        model: Callable[..., mx.array],
        eyes: Eyes,
        make_cache: Callable[[], list[Any]],
        example: Example,
    ) -> None:
        self.eyes, self.prompt, self.media = eyes, example.prompt, example.media
        self._model = model
        self._make_cache = make_cache
        self.whole_to = self._row(0).whole_to
        self._cold = self._go_on(make_cache(), 0)

    def agrees(self, cut: int) -> bool:
        """Whether a row that begins behind `cut` restored tokens goes on as if it had computed them."""
        first = self._make_cache()
        row = self._row(0)
        self._forward(self.prompt[:cut], first, row.told(0, self.prompt[:cut]))
        pages = PageFormat(self._make_cache())
        pages.measure(first)
        kept = [(pages.pack(pages.planes(first, 0, cut)), cut)]
        state = pages.pack_state(pages.states(first)) if pages.has_states else None
        warm = self._go_on(pages.restore(kept, cut, state), cut)
        want, got = self._cold.astype(mx.float32), warm.astype(mx.float32)
        tolerance = TOLERANCE.get(self._cold.dtype, 1e-4) * mx.abs(want).max()
        return bool((mx.abs(want - got).max() <= tolerance).item())

    def _row(self, held: int) -> Any:
        row = self.eyes.row(self.prompt, self.media, held)
        while not row.encoded:
            row.encode()
        return row

    def _go_on(self, caches: list[Any], held: int) -> mx.array:
        """The rest of the prompt and one token more: logits of both, `[2, vocab]`."""
        row, rest = self._row(held), self.prompt[held:]
        last = self._forward(rest, caches, row.told(held, rest))
        told = {"deltas": mx.array([row.delta], dtype=mx.int32)} if row.delta else {}
        return mx.concatenate([last, self._forward(self.prompt[:1], caches, told)])

    def _forward(self, tokens: tuple[int, ...], caches: list[Any], told: dict[str, Any]) -> mx.array:
        logits: mx.array = self._model(mx.array([tokens], dtype=mx.int32), cache=caches, **told)[:, -1]
        mx.eval(logits)
        return logits
