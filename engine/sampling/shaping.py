"""What rows add to their logits: biases, penalties, and tokens that they may not draw.

Sources: OpenAI's API reference and "frequency and presence penalties" (each generated token's count times the
one, plus the other once: prompt tokens do not count); Keskar et al. 2019, "CTRL", section 4.1, for
repetition_penalty as Hugging Face and vLLM apply it (prompt tokens count).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling.rows import column, replaced, taken

BAN = -1e25
"""Added to the logit of a token that is not to be drawn yet. Finite: where a constraint leaves nothing else,
the token is drawn after all. No logit comes near, and over the coldest temperature it is still a float32."""
IN_PROMPT = 0.5
"""In a row's counts, added to those of the prompt's tokens: `floor` gives the times drawn, `> 0` whether the
token was seen at all."""
LEAST_REPETITION = 1e-6
"""A smaller repetition_penalty counts as this, which takes no logit out of float32."""


class _Block:
    """Counts of rows that draw together, float32 `[rows, vocab]`."""

    __slots__ = ("counts",)

    def __init__(self, counts: mx.array) -> None:
        self.counts = counts


class Tally:
    """How often each token came in one row, on the device: a draw is counted where it is made, before the
    host knows it."""

    __slots__ = ("_answer", "_at", "_block", "_prompt")

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._prompt, self._answer = prompt, answer
        self._block: _Block | None = None  # that of the last draw; the first makes it
        self._at = 0

    def _row(self, vocab: int) -> mx.array:
        if self._block is not None:
            return self._block.counts[self._at]
        seen = np.zeros(vocab, dtype=np.float32)
        # Ids beyond the logits belong to no token that could be drawn.
        answer, prompt = np.array(self._answer, dtype=np.int64), np.array(self._prompt, dtype=np.int64)
        np.add.at(seen, answer[answer < vocab], 1)
        seen[np.unique(prompt[prompt < vocab])] += IN_PROMPT
        self._prompt = self._answer = ()
        return mx.array(seen)

    @staticmethod
    def counts(tallies: Sequence[Tally], vocab: int) -> mx.array:
        """float32 `[len(tallies), vocab]`; without a copy where the rows are those of the last step."""
        block = tallies[0]._block
        if (
            block is not None
            and len(tallies) == block.counts.shape[0]
            and all(tally._block is block and tally._at == at for at, tally in enumerate(tallies))
        ):
            return block.counts
        return mx.stack([tally._row(vocab) for tally in tallies])

    @staticmethod
    def count(tallies: Sequence[Tally], counts: mx.array, tokens: mx.array) -> None:
        """Each row has drawn its token of `tokens`, int32 `[len(tallies)]`."""
        block = _Block(counts.at[mx.arange(len(tallies)), tokens].add(1.0))
        for at, tally in enumerate(tallies):
            tally._block, tally._at = block, at


class Shaping:
    """What one row adds to its logits. Made on the MLX thread when the row is admitted.

    Args:
        sampling: its settings.
        ends: tokens that end its answer, which are not drawn before `min_tokens`.
        prompt, answer: its tokens so far, where penalties count them.
    """

    __slots__ = ("_mask", "allowed", "bias", "biased", "ends", "sampling", "tally")

    def __init__(
        self,
        sampling: SamplingParams,
        ends: Collection[int] = (),
        prompt: Sequence[int] = (),
        answer: Sequence[int] = (),
    ) -> None:
        self.sampling = sampling
        self.biased = np.array(list(sampling.logit_bias), dtype=np.int32)
        self.bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self.ends = np.array(sorted(ends), dtype=np.int32)
        self.allowed = np.array(sampling.allowed_token_ids or (), dtype=np.int32)
        self.tally = Tally(prompt, answer) if sampling.counts_tokens else None
        self._mask: mx.array | None = None

    def mask(self, vocab: int) -> mx.array:
        """bool `[vocab]`: the allowed tokens."""
        if self._mask is None:
            mask = np.zeros(vocab, dtype=np.bool_)
            mask[self.allowed[self.allowed < vocab]] = True
            self._mask = mx.array(mask)
        return self._mask

    def addends(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, what is added to their logits) in the draw after `count` tokens. One may come twice."""
        if count >= self.sampling.min_tokens or not len(self.ends):
            return self.biased, self.bias
        ban = np.full(len(self.ends), BAN, dtype=np.float32)
        return np.concatenate([self.biased, self.ends]), np.concatenate([self.bias, ban])


class Counted:
    """The rows of a step whose draws are counted."""

    def __init__(self, shapings: Sequence[Shaping | None], vocab: int) -> None:
        self.rows = [row for row, shaping in enumerate(shapings) if shaping is not None and shaping.tally]
        self.shapings = [shaping for row in self.rows if (shaping := shapings[row]) is not None]
        self._tallies = [shaping.tally for shaping in self.shapings if shaping.tally is not None]
        self.counts = Tally.counts(self._tallies, vocab) if self._tallies else None

    def count(self, tokens: mx.array) -> None:
        """Take in what all rows of the step have drawn, int32 `[rows]`."""
        if self.counts is not None:
            Tally.count(self._tallies, self.counts, taken(tokens, self.rows))


def shaped(
    logits: mx.array, shapings: Sequence[Shaping | None], counts: Sequence[int], counted: Counted
) -> mx.array:
    """Logits `[rows, vocab]` as the rows' settings make them; rows without any pass unchanged.

    In order: logit_bias and the ban of ends, then repetition_penalty, frequency_penalty and presence_penalty,
    then allowed_token_ids.

    Args:
        counts: tokens that each row has drawn before.
    """
    logits = _biased(logits, shapings, counts)
    if counted.counts is not None:
        part = _penalized(taken(logits, counted.rows), counted.counts, counted.shapings)
        logits = replaced(logits, counted.rows, part)
    return _restricted(logits, shapings)


def _biased(logits: mx.array, shapings: Sequence[Shaping | None], counts: Sequence[int]) -> mx.array:
    rows: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for row, shaping in enumerate(shapings):
        if shaping is None:
            continue
        where, what = shaping.addends(counts[row])
        if not len(where):
            continue
        known = where < logits.shape[-1]
        tokens.append(where[known])
        values.append(what[known])
        rows.append(np.full(len(tokens[-1]), row, dtype=np.int32))
    if not rows:
        return logits
    at = mx.array(np.concatenate(rows)), mx.array(np.concatenate(tokens))
    return logits.at[at].add(mx.array(np.concatenate(values)))


def _penalized(logits: mx.array, counts: mx.array, shapings: Sequence[Shaping]) -> mx.array:
    settings = [shaping.sampling for shaping in shapings]
    if any(params.repetition_penalty != 1 for params in settings):
        penalty = column([max(params.repetition_penalty, LEAST_REPETITION) for params in settings])
        # Sums of which one part is zero: on a CPU several times faster than a choice between two arrays.
        scale = 1 + (counts > 0) * (penalty - 1)
        logits = mx.maximum(logits, 0) / scale + mx.minimum(logits, 0) * scale
    if any(params.frequency_penalty or params.presence_penalty for params in settings):
        times = mx.floor(counts)
        frequency = column([params.frequency_penalty for params in settings])
        presence = column([params.presence_penalty for params in settings])
        logits = logits - (times * frequency + (times > 0) * presence)
    return logits


def _restricted(logits: mx.array, shapings: Sequence[Shaping | None]) -> mx.array:
    """-inf for whatever allowed_token_ids leaves out."""
    strict = {
        row: shaping
        for row, shaping in enumerate(shapings)
        if shaping is not None and shaping.sampling.allowed_token_ids is not None
    }
    if not strict:
        return logits
    rows, vocab = list(strict), logits.shape[-1]
    mask = mx.stack([shaping.mask(vocab) for shaping in strict.values()])
    return replaced(logits, rows, mx.where(mask, taken(logits, rows), -mx.inf))
