"""One row by itself: chunks of its prompt, its images, a token, on the row's own caches.

All methods run on the MLX thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from chairlift.engine.plan import Span
from chairlift.engine.prompt_scores import pieces_of, score
from chairlift.engine.residents import Resident, Residents
from chairlift.engine.sight import RowSight, Sight, SightError

Forward = Callable[..., mx.array]


class Chunks:
    """Args: those of `MlxRunner`."""

    def __init__(
        self, residents: Residents, forward: Forward, *, whole_prompts: bool, sight: Sight | None
    ) -> None:
        self._residents = residents
        self._forward = forward
        self._whole_prompts = whole_prompts
        self._sight = sight

    def close(self) -> None:
        """Let the model go."""
        self._forward = closed
        self._sight = None

    def prefill(self, span: Span) -> mx.array | None:
        """Prefill a chunk on the row's own caches. The last known token is left to the decode pass, so that
        no logits are computed here; but a state that holds nothing yet takes it, and so does one whose last
        token belongs to the rest (an image, a prompt in one piece): its logits `[1, vocab]` are returned."""
        row = self._residents.rows[span.row]
        sight = self.look(row)
        while sight is not None and not sight.encoded:
            sight.encode()
        tokens = row.held_back + span.tokens
        end = span.start + len(span.tokens)
        start = end - len(tokens)
        whole_to = math.inf if self._whole_prompts else sight.whole_to if sight is not None else 0
        if end < whole_to and not span.last:
            row.held_back = tokens
            return None
        row.held_back = ()
        bound = (self._whole_prompts and not row.spec.drawn) or (sight is not None and sight.bound(end - 1))
        left = span.last and end > 1 and not bound
        if left:
            row.pending = mx.array(tokens[-1], dtype=mx.int32)
            tokens = tokens[:-1]
        # What a row of whole prompts drew before it was preempted was fed token by token.
        prompt = len(row.spec.prompt) if sight is not None else end - row.spec.drawn
        first = prompt - start if start < whole_to and row.spec.drawn else len(tokens)
        pieces = [tokens[:first], *((token,) for token in tokens[first:])]
        wanted = row.spec.sampling.prompt_logprobs
        logits = None
        for piece in pieces if wanted is None else pieces_of(pieces):
            if piece:
                told = sight.told(row.held, piece) if sight is not None else {}
                inputs = mx.array(piece, dtype=mx.int32)[None]
                logits = self._forward(inputs, self._residents.own(span.row), **told)
                if (
                    wanted is not None
                    and (found := score(logits[0], row.prompt, row.held, wanted)) is not None
                ):
                    row.scores.append(found)
                logits = logits[:, -1]
                row.held += len(piece)
        return logits if span.last and not left else None

    def decode(self, row_id: int) -> mx.array:
        """Logits `[1, vocab]` after the row's pending token."""
        row = self._residents.rows[row_id]
        assert row.pending is not None
        told = {"deltas": mx.array([row.delta], dtype=mx.int32)} if row.delta else {}
        logits = self._forward(row.pending.reshape(1, 1), self._residents.own(row_id), **told)[:, -1]
        row.held += 1
        return logits

    def look(self, row: Resident) -> RowSight | None:
        """The row's images, or None."""
        if row.spec.media is not None and row.sight is None:
            if self._sight is None:
                raise SightError("This model takes no images.")
            held = row.spec.restore.tokens if row.spec.restore is not None else 0
            row.sight = self._sight.row(row.spec.prompt, row.spec.media, held)
        return row.sight


def closed(tokens: mx.array, caches: list[Any]) -> mx.array:
    """Stands for a model that has gone."""
    raise RuntimeError("The runner is closed.")
