"""Tokens of a model that sampling treats apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.engine.plan import NewRow, Tokenizer
from chairlift.engine.sampling.shaping import Shaping


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one model.

    Attributes:
        eos: its end-of-sequence tokens.
        line_breaks: the tokens of a line break.
        spared: what xtc leaves alone, as in mlx-lm.
    """

    eos: frozenset[int] = frozenset()
    line_breaks: tuple[int, ...] = ()
    spared: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spared", (*sorted(self.eos), *self.line_breaks))

    def shaping(self, row: NewRow) -> Shaping | None:
        """What the row adds to its logits; None for nothing."""
        sampling = row.sampling
        if not sampling.shapes_logits:
            return None
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos)}
        answer = len(row.known) - row.drawn
        return Shaping(sampling, ends, row.known[:answer], row.known[answer:])


def marks_of(tokenizer: Tokenizer) -> Marks:
    return Marks(tokenizer.eos_token_ids, tuple(tokenizer.encode("\n", add_special_tokens=False)))
