"""What a batch of texts takes of the processor."""

from __future__ import annotations

import mlx.core as mx

from chairlift.engine.blas import Blas
from chairlift.engine.embedding.encoder import MlxEncoder
from chairlift.engine.embedding.types import TokenizedText


def test_a_batch_takes_all_threads_whatever_a_decode_step_left() -> None:
    used: list[int] = [1]

    def states(ids: mx.array, types: mx.array, mask: mx.array) -> mx.array:
        return mx.full((*ids.shape, 1), used[-1])

    encoder = MlxEncoder(states, lambda hidden, mask: hidden[:, 0], 0, Blas(4, used.append))
    assert encoder.encode([TokenizedText((5, 6))]).tolist() == [[4.0]]
