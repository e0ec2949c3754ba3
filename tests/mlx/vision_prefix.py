"""Conversations with images that begin with kept prefixes, held against the same ones computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.engine.media import PreparedMedia
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.image_prefix import Example
from chairlift.engine.models.images import Eyes
from chairlift.engine.models.vision import SeeingModel
from chairlift.engine.plan import Sample
from chairlift.engine.row import Row
from chairlift.engine.runner import MlxRunner
from chairlift.patches import MLX, MLX_LM, MLX_VLM, apply_patches
from tests.mlx.lift import LOGPROB_ERROR
from tests.mlx.prefix_server import Server
from tests.mlx.solo import TIE, Prompt
from tests.mlx.vision_families import (
    FAMILIES,
    TEXT_TOKENS,
    VOCABULARY,
    Image,
    seeing_prompt,
    text_prompt,
)
from tests.mlx.vision_parity import finding, solo

TEXT = tuple(range(TEXT_TOKENS))
"""What may be drawn: an image's token in an answer would be one of no image in the next turn."""


def seeing_runner(name: str) -> tuple[MlxRunner, Eyes]:
    """A runner that has tried on a small example whether it can keep prefixes with images."""
    found, model, family = finding(name), solo(name).model, FAMILIES[name]
    apply_patches((MLX, MLX_LM, MLX_VLM))
    eyes = Eyes(model)
    example = Example(*seeing_prompt(family, 9, [family.image(2, 3, seed=5)], 8, seed=3))
    batching = None if found.whole_prompts else found.batching
    return make_runner(SeeingModel(model), VOCABULARY, batching, eyes, example=example)[1], eyes


def compared(
    want: Sequence[Sample], got: Sequence[Sample], error: float = LOGPROB_ERROR, tie: float = TIE
) -> bool:
    """The same tokens and log probabilities, up to where two tokens are as good as equal.

    Args:
        error: most that the log probability of a token drawn may differ.
        tie: most that those of two tokens differ of which either may be drawn.
    """
    for one, two in zip(want, got, strict=True):
        assert one.logprob is not None and two.logprob is not None
        if one.token != two.token:
            return abs(one.logprob - two.logprob) <= tie
        if abs(one.logprob - two.logprob) > error:
            return False
    return True


@dataclass
class Pair:
    """One server that keeps prefixes, and one that computes everything."""

    name: str
    asked: list[tuple[Prompt, PreparedMedia | None, Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner, self.eyes = seeing_runner(self.name)
        self.runner = runner
        self.warm = Server.of(runner)

    def ask(self, prompt: Sequence[int], images: Sequence[Image] = ()) -> Row:
        """Answered before this returns."""
        media = FAMILIES[self.name].media(images) if images else None
        row = self.warm.add(prompt, media=media, allowed=TEXT)
        self.asked.append((tuple(prompt), media, row))
        self.warm.finish()
        return row

    def drawn(self, row: Row) -> list[int]:
        return self.warm.drawn(row)

    def differing(self) -> list[int]:
        """Of what was asked, by number: what a server that keeps nothing answers otherwise."""
        cold = Server.of(self.runner, keeps=False)
        wrong = []
        for number, (prompt, media, row) in enumerate(self.asked):
            mine = cold.add(prompt, media=media, allowed=TEXT)
            cold.finish()
            if not compared(cold.answers[mine], self.warm.answers[row]):
                wrong.append(number)
        return wrong


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a conversation about an image, and others like it."""

    first: Row
    again: Row
    turn: Row
    more: Row
    other: Row
    differing: tuple[int, ...]
    place: int
    """Of the first image's first token."""


def conversation(name: str) -> Outcome:
    """A prompt with an image; the same again; the next turn, and one more with another image; and the first
    with another image in place of its own."""
    family, pair = FAMILIES[name], Pair(name)
    image, unlike, third = (family.image(2, 2, seed=seed) for seed in (1, 2, 3))
    prompt, _ = seeing_prompt(family, 131, [image], 33, seed=4)
    swapped, _ = seeing_prompt(family, 131, [unlike], 33, seed=4)
    assert swapped == prompt
    first = pair.ask(prompt, [image])
    again = pair.ask(prompt, [image])
    second = [*prompt, *pair.drawn(first), *text_prompt(20, 7)]
    turn = pair.ask(second, [image])
    more = pair.ask([*second, *pair.drawn(turn), *third.tokens, *text_prompt(9, 8)], [image, third])
    other = pair.ask(prompt, [unlike])
    place = prompt.index(image.tokens[len(family.wrap[0])], 131)
    return Outcome(first, again, turn, more, other, tuple(pair.differing()), place)
