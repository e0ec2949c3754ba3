"""Computes a batch of texts: padded on the right, masked, pooled. Lives on the MLX thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from chairlift.engine.blas import Blas
from chairlift.engine.embedding.heads import Head
from chairlift.engine.embedding.types import BatchCost, TokenizedText, Vectors

States = Callable[[mx.array, mx.array, mx.array], mx.array]
"""(token ids, type ids, mask) to the last hidden states."""

TOLERANCE = 1e-3
"""Of the self-test, relative to the longest vector: far above rounding of half precision over few tokens'
pooled states, far below what a missing mask changes."""


TIDY_BATCHES = 64
"""Batches between two clearings of the allocator's cache: every batch has a shape of its own, and what was
kept for others is seldom used again."""


class MlxEncoder:
    """`chairlift.engine.embedding.types.Encoder`.

    Args:
        states: the layers.
        head: makes `[texts, width]` of the last hidden states.
        pad_id: a token that padding is filled with.
        blas: of which a batch takes all threads, whatever another model's steps left it at.
    """

    def __init__(self, states: States, head: Head, pad_id: int, blas: Blas | None = None) -> None:
        self._states: States | None = states
        self._head: Head | None = head
        self._pad_id = pad_id
        self._blas = blas
        self._batches = 0

    def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        assert self._states is not None and self._head is not None, "closed"
        shape = (len(texts), max(map(len, texts)))
        ids, types = np.full(shape, self._pad_id, np.int32), np.zeros(shape, np.int32)
        mask = np.zeros(shape, np.bool_)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text.token_ids
            types[row, : len(text.type_ids)] = text.type_ids
            mask[row, : len(text)] = True
        if self._blas is not None:
            self._blas.use_all()
        there = mx.array(mask)
        hidden = self._states(mx.array(ids), mx.array(types), there)
        vectors: Vectors = np.array(self._head(hidden, there).astype(mx.float32))
        self._batches += 1
        if self._batches % TIDY_BATCHES == 0:
            mx.clear_cache()
        return vectors

    def close(self) -> None:
        self._states = self._head = None
        mx.clear_cache()
        # As the runner of a generating model does: streams go with the thread that made them.
        mx.synchronize()
        mx.clear_streams()


MEASURED = 2
"""Times: buffers are taken as fast as the host goes and freed as fast as the device does, so peaks differ."""


def measure(encoder: MlxEncoder, vocab_size: int, longest: int) -> BatchCost:
    """What a text takes beside the weights, from one of so many tokens and one of half as many. What other
    threads compute meanwhile counts, too."""

    def once(text: TokenizedText) -> int:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        encoder.encode([text])
        return max(0, mx.get_peak_memory() - before)

    def peak(tokens: int) -> tuple[int, int]:
        text = TokenizedText(tuple(31 * place % vocab_size for place in range(tokens)))
        return tokens, max(once(text) for _ in range(MEASURED))

    return BatchCost.measured(peak(max(1, longest // 2)), peak(longest))


def padding_is_harmless(encoder: MlxEncoder, vocab_size: int, longest: int) -> bool:
    """Whether texts of different lengths give in one batch what they give alone."""
    texts = [
        TokenizedText(tuple((31 * place + 7 * length) % vocab_size for place in range(length)))
        for length in {min(length, longest) for length in (2, 5, 11)}
    ]
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    scale = max(1e-6, float(np.abs(alone).max()))
    return bool(np.abs(together - alone).max() <= TOLERANCE * scale)
