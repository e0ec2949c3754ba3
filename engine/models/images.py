"""Images of mlx-vlm's models: encoded once each, then read as embeddings of the prompt's image tokens.

A family's `get_input_embeddings` runs its vision tower and puts the features in place of the image tokens'
embeddings. What it puts there depends on the image alone in nearly every family, so those rows are kept by
the image's digest and serve every later prompt with that image, wherever it stands. Whether it is so is tried
on the first image that a model sees. Families that compute more from a prompt than that (per-layer inputs),
or whose features depend on where the image stands, are kept by the whole prompt.

Runs on the MLX thread. Encoding and the index of multimodal positions read arrays on the host, as upstream's
code does; nothing else here does.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.media import PreparedMedia
from chairlift.engine.models.encoded import EncodedImages
from chairlift.engine.models.image_inputs import NOT_INPUTS, PIXELS, as_mlx, image_token_ids, split_inputs
from chairlift.engine.models.image_rows import (
    Encoded,
    ImageRows,
    PromptRows,
    alike,
    length,
    near,
    together,
)
from chairlift.engine.sight import SightError

BY_IMAGE = frozenset(
    {
        "inputs_embeds",
        "position_ids",
        "rope_deltas",
        "visual_pos_masks",
        "deepstack_visual_embeds",
        "attention_mask",
        "attention_mask_4d",
        "per_layer_inputs",
    }
)
"""What `get_input_embeddings` may return where features belong to images one by one. Its 4-d mask is all
ones: upstream's own generation passes it on under a name that no such language model reads."""
OF_TOKENS = ("per_layer_inputs",)
"""Of these, what must follow from the tokens alone: a prompt without pixels gives the same."""
TOKEN_TYPES = "mm_token_type_ids"


class Eyes:
    """`chairlift.engine.sight.Sight` of one mlx-vlm model.

    Args:
        model: as mlx-vlm loads it.
        kept: encoded images of this model.
    """

    def __init__(self, model: Any, kept: EncodedImages[Encoded] | None = None) -> None:
        self.model = model
        self.kept: EncodedImages[Encoded] = EncodedImages() if kept is None else kept
        self.by_image: bool | None = None
        """Whether features belong to images one by one; None until the first image."""
        self.image_tokens = np.array(image_token_ids(model.config), dtype=np.int64)
        self.sees_both_ways = has_vision_attention(model.language_model)
        self.rope_index = getattr(model.language_model, "get_rope_index", None)

    def row(self, prompt: tuple[int, ...], media: PreparedMedia, held: int = 0) -> RowImages:
        """See `chairlift.engine.sight.Sight`."""
        return RowImages(self, prompt, media, held)

    def whole_to(self, tokens: Sequence[int]) -> int:
        """Where the part of a prompt with images ends that must be prefilled in one piece; 0: none."""
        if not self._whole_prompts(tokens):
            return 0
        places = np.flatnonzero(np.isin(np.array(tokens, dtype=np.int64), self.image_tokens))
        return int(places[-1]) + 1 if self.sees_both_ways and len(places) else len(tokens)

    def _whole_prompts(self, tokens: Sequence[int]) -> bool:
        """The model says that a prompt with images must not be prefilled in chunks."""
        parts = (self.model, self.model.language_model)
        told = {TOKEN_TYPES: self.types(tokens)} if self.sees_both_ways else {}
        for part in parts:
            policy = getattr(part, "chunked_prefill_policy", None)
            if callable(policy):
                return not policy(input_ids=_ids(tokens), prefill_kwargs=told)
        return any(getattr(part, "no_chunked_prefill", False) for part in parts)

    def types(self, tokens: Sequence[int]) -> mx.array:
        """int32 `[1, n]`: 1 for tokens of images."""
        return mx.array(np.isin(np.array(tokens, dtype=np.int64), self.image_tokens).astype(np.int32))[None]

    def text(self, tokens: Sequence[int]) -> dict[str, mx.array]:
        """What the language model is told of text: embeddings `[1, n, hidden]`, and what else it wants by
        token, `[1, n, ...]`."""
        found = self.model.get_input_embeddings(_ids(tokens), None).to_dict()
        return {name: found[name] for name in ("inputs_embeds", *OF_TOKENS) if found.get(name) is not None}

    def features(self, tokens: Sequence[int], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the model makes of a prompt with images: upstream's `InputEmbeddingsFeatures`, without what
        is None."""
        ids = _ids(tokens)
        pixels = as_mlx(inputs.get(PIXELS))
        if pixels is None:
            raise SightError("The images of the prompt came without pixels.")
        rest = {name: as_mlx(value) for name, value in inputs.items() if name not in NOT_INPUTS}
        found = self.model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **rest).to_dict()
        if found["inputs_embeds"].shape[1] != len(tokens):
            raise SightError("This model lengthens a prompt by its images, which is not supported.")
        return {name: value for name, value in found.items() if value is not None}


class RowImages:
    """`chairlift.engine.sight.RowSight` of one row."""

    def __init__(self, eyes: Eyes, prompt: tuple[int, ...], media: PreparedMedia, held: int = 0) -> None:
        self._eyes = eyes
        self._prompt = prompt
        self._media = media
        self._places = np.flatnonzero(np.isin(np.array(prompt, dtype=np.int64), eyes.image_tokens))
        counts = media.tokens or ((len(self._places),) if len(media.digests) == 1 else ())
        if len(self._places) == 0 or (counts and sum(counts) != len(self._places)):
            raise SightError(
                f"The prompt holds {len(self._places)} image tokens where its images take {sum(counts)}."
            )
        ends = np.cumsum(counts, dtype=np.int64)
        self._ranges = [(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]
        self._parts = split_inputs(media.inputs, counts) if len(self._ranges) > 1 else None
        self._images: list[ImageRows | None] = [None] * len(self._ranges)
        self._needed = [at for at, (_, last) in enumerate(self._ranges) if self._places[last - 1] >= held]
        """Images that are not wholly behind the row when it begins."""
        self._prompt_rows: PromptRows | None = None
        self._positions: mx.array | None = None
        self.delta = 0
        self.encoded = False
        self.whole_to = eyes.whole_to(prompt)

    # Encoding

    def encode(self) -> None:
        """See `chairlift.engine.sight.RowSight`."""
        if self.encoded:
            return
        try:
            self._encode_more()
        except SightError:
            raise
        except Exception as error:
            raise SightError("The images of the prompt could not be encoded.") from error

    def _encode_more(self) -> None:
        if self._eyes.by_image is None and self._ranges:
            self._try_by_image()
        if self._eyes.by_image and self._ranges:
            self._encode_image()
        else:
            self._encode_prompt()
        if self._prompt_rows is not None or all(self._images[index] is not None for index in self._needed):
            self._find_positions()
            self.encoded = True

    def _try_by_image(self) -> None:
        """Encode the whole prompt, and its first image (all of them, where their inputs cannot be told
        apart) without the text around it: are the features the same?"""
        whole = self._eyes.features(self._prompt, self._media.inputs)
        self._eyes.by_image = False
        text = self._eyes.text(self._prompt)
        by_token = [name for name in OF_TOKENS if name in whole]
        if not whole.keys() <= BY_IMAGE or not all(
            name in text and near(whole[name], text[name]) for name in by_token
        ):
            return
        first, last = self._ranges[0] if self._parts is not None else (0, len(self._places))
        (image,) = self._cut_out(whole, 0, [(first, last)], 0)
        group = range(1) if self._parts is not None else range(len(self._ranges))
        alone = self._features_of(group)
        if alone is None:
            return
        self._eyes.by_image = alike(image, alone[0] if len(group) == 1 else together(alone))
        if self._eyes.by_image:
            for index, found in enumerate(self._cut_out(whole, 0, self._ranges, 0)):
                self._keep(index, found)

    def _encode_image(self) -> None:
        """What is kept of the images, and the first that is not kept."""
        for index, key in enumerate(self._keys()):
            found = self._eyes.kept.get(key)
            if isinstance(found, ImageRows) and len(found.embeds) == length(self._ranges[index]):
                self._images[index] = found
        missing = [index for index in self._needed if self._images[index] is None]
        if not missing:
            return
        group = range(len(self._ranges)) if self._parts is None else range(missing[0], missing[0] + 1)
        for index, image in zip(group, self._features_of(group) or (), strict=True):
            self._keep(index, image)

    def _features_of(self, group: range) -> list[ImageRows] | None:
        """Neighbouring images without the text around them, None where the model gives more than features."""
        inputs = self._media.inputs if self._parts is None else self._parts[group[0]]
        ranges = [self._ranges[index] for index in group]
        start = int(self._places[ranges[0][0]])
        stop = int(self._places[ranges[-1][1] - 1]) + 1
        features = self._eyes.features(self._prompt[start:stop], inputs)
        return self._cut_out(features, start, ranges, ranges[0][0]) if features.keys() <= BY_IMAGE else None

    def _cut_out(
        self, features: Mapping[str, Any], start: int, ranges: Sequence[tuple[int, int]], base: int
    ) -> list[ImageRows]:
        """Images of the prompt from `start` on; their features among the deep ones begin with the image
        token `base`."""
        embeds = features["inputs_embeds"][0]
        deep = list(features.get("deepstack_visual_embeds", ()))
        return [
            ImageRows(
                embeds[mx.array(self._places[first:last] - start)],
                tuple(layer[first - base : last - base] for layer in deep),
            )
            for first, last in ranges
        ]

    def _keep(self, index: int, image: ImageRows) -> None:
        mx.eval(image.embeds, *image.deep)
        self._images[index] = image
        self._eyes.kept.put(self._keys()[index], image)

    def _keys(self) -> Sequence[Hashable]:
        return [("image", digest) for digest in self._media.digests]

    def _encode_prompt(self) -> None:
        key = ("prompt", self._media.digests, _digest(self._prompt))
        found = self._eyes.kept.get(key)
        if not isinstance(found, PromptRows):
            features = self._eyes.features(self._prompt, self._media.inputs)
            if "cross_attention_states" in features or "decoder_inputs_embeds" in features:
                raise SightError("This model reads images by cross attention, which is not supported.")
            found = PromptRows(
                {
                    name: value
                    for name, value in features.items()
                    if isinstance(value, mx.array)
                    and value.ndim > 1
                    and value.shape[1] == len(self._prompt)
                    and name not in ("position_ids", "attention_mask")
                }
            )
            mx.eval(list(found.arrays.values()))
            self._eyes.kept.put(key, found)
        self._prompt_rows = found

    def _find_positions(self) -> None:
        """Multimodal positions `[3, 1, prompt]` and the delta behind them, where the family has such."""
        index = self._eyes.rope_index
        if index is None:
            return
        ids = _ids(self._prompt)
        grid = as_mlx(self._media.inputs.get("image_grid_thw"))
        positions, deltas = index(ids, grid, None, mx.ones_like(ids))
        positions = positions[None] if positions.ndim == 2 else positions
        self._positions = mx.broadcast_to(positions, (3, 1, len(self._prompt))).astype(mx.int32)
        self.delta = int(np.array(deltas).reshape(-1)[0])
        mx.eval(self._positions)

    # Prefill

    def bound(self, position: int) -> bool:
        """See `chairlift.engine.sight.RowSight`."""
        if position >= len(self._prompt):
            return False
        if position < self.whole_to or self._prompt_rows is not None:
            return True
        return bool(np.isin(position, self._places))

    def told(self, start: int, tokens: Sequence[int]) -> dict[str, Any]:
        """See `chairlift.engine.sight.RowSight`."""
        stop = start + len(tokens)
        told: dict[str, Any] = {}
        if self._eyes.sees_both_ways and start < len(self._prompt):
            told[TOKEN_TYPES] = self._eyes.types(tokens)
        if self._positions is not None:
            told["position_ids"] = self._span_positions(start, stop)
        if self._prompt_rows is not None:
            return told | self._span_of_prompt(self._prompt_rows, start, tokens)
        first, last = (int(at) for at in np.searchsorted(self._places, (start, stop)))
        text = self._eyes.text(tokens)
        embeds = text["inputs_embeds"]
        if last > first:
            at = mx.array(self._places[first:last] - start)
            images = self._images_of(first, last)
            embeds[:, at] = images.embeds.astype(embeds.dtype)
            if images.deep:
                seen = np.zeros((1, len(tokens)), dtype=bool)
                seen[0, self._places[first:last] - start] = True
                told["visual_pos_masks"] = mx.array(seen)
                told["deepstack_visual_embeds"] = list(images.deep)
        return told | text | {"inputs_embeds": embeds}

    def _images_of(self, first: int, last: int) -> ImageRows:
        """What stands for the image tokens `[first, last)`."""
        parts = []
        for (start, stop), image in zip(self._ranges, self._images, strict=True):
            if start < last and stop > first:
                assert image is not None
                parts.append(image.cut(max(first - start, 0), last - start))
        return parts[0] if len(parts) == 1 else together(parts)

    def _span_positions(self, start: int, stop: int) -> mx.array:
        assert self._positions is not None
        end = len(self._prompt)
        known = self._positions[..., start : min(stop, end)]
        if stop <= end:
            return known
        more = mx.arange(max(start, end), stop, dtype=mx.int32) + self.delta
        return mx.concatenate([known, mx.broadcast_to(more, (3, 1, len(more)))], axis=2)

    def _span_of_prompt(self, rows: PromptRows, start: int, tokens: Sequence[int]) -> dict[str, Any]:
        end = len(self._prompt)
        parts = {name: array[:, start : min(start + len(tokens), end)] for name, array in rows.arrays.items()}
        behind = tokens[max(0, end - start) :]
        if not behind:
            return parts
        text = self._eyes.text(behind)
        return {name: mx.concatenate([part, text[name]], axis=1) for name, part in parts.items()}


def has_vision_attention(language_model: Any) -> bool:
    """Whether the tokens of an image see each other both ways, as the model is told by types of tokens
    (Gemma 4)."""
    body = getattr(language_model, "model", None)
    takes = TOKEN_TYPES in inspect.signature(type(body).__call__).parameters
    return takes and getattr(language_model.config, "use_bidirectional_attention", None) == "vision"


def _ids(tokens: Sequence[int]) -> mx.array:
    return mx.array(list(tokens), dtype=mx.int32)[None]


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).hexdigest()
