"""Searching a vocabulary in blocks, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from chairlift.engine.sampling.blocks import at_share, highest

VOCABULARIES = (1, 2, 127, 128, 129, 300, 5000)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("ties", [False, True])
def test_highest(vocab: int, ties: bool) -> None:
    values = np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32)
    if ties:
        values = np.round(values)
    values[1, vocab // 2 :] = -np.inf
    for count in {1, min(2, vocab), min(20, vocab), min(60, vocab)}:
        tokens, found = (np.array(part) for part in highest(mx.array(values), count))
        assert (found == -np.sort(-values, axis=-1)[:, :count]).all()
        assert (np.take_along_axis(values, tokens, axis=-1) == found).all()
        assert all(len(set(row)) == count for row in tokens.tolist()), "every token once"


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_at_share(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    weights = rng.exponential(size=(200, vocab)).astype(np.float32)
    weights[:, 1:] *= rng.random(size=(200, vocab - 1)) < 0.3
    shares = np.append(rng.random(198), (0.0, 1 - 2.0**-24)).astype(np.float32)
    got = np.array(at_share(mx.array(weights), mx.array(shares)))
    running = np.cumsum(weights.astype(np.float64), axis=-1)
    target = shares.astype(np.float64) * running[:, -1]
    want = (running <= target[:, None]).sum(axis=-1)
    near = np.abs(running - target[:, None]).min(axis=-1) < 1e-5 * running[:, -1]
    assert (weights[np.arange(200), got] > 0).all()
    assert ((got == want) | near).all()
    assert near.mean() < 0.9


def test_at_share_by_hand() -> None:
    weights = mx.array([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]] * 6)
    shares = mx.array([0.0, 0.24, 0.25, 0.74, 0.75, 0.99])
    assert at_share(weights, shares).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("place", [0, 1, 127, 128, 129, 400, 511])
def test_a_single_weight_is_drawn_at_any_share(place: int) -> None:
    weights = np.zeros((5, 512), dtype=np.float32)
    weights[:, place] = [1e-38, 1e-20, 1.0, 3.3, 1e30]
    for share in (0.0, 0.5, 1 - 2.0**-24):
        assert at_share(mx.array(weights), mx.full((5,), share)).tolist() == [place] * 5


def test_weights_of_very_different_sizes() -> None:
    """What rounds to nothing beside its neighbours is passed over, and never a weight of 0 drawn."""
    rng = np.random.default_rng(0)
    weights = np.exp(rng.normal(size=(400, 700)) * 15).clip(max=1e30).astype(np.float32)
    weights[rng.random(weights.shape) < 0.5] = 0
    shares = np.where(np.arange(400) % 2, 1 - 2.0**-24, rng.random(400)).astype(np.float32)
    got = np.array(at_share(mx.array(weights), mx.array(shares)))
    assert (weights[np.arange(400), got] > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_falls_within_the_vocabulary(bad: float) -> None:
    weights = np.ones((2, 130), dtype=np.float32)
    weights[0, :] = bad
    weights[1, 129] = bad
    assert all(0 <= token < 130 for token in at_share(mx.array(weights), mx.array([0.5, 0.999])).tolist())  # type: ignore[union-attr]
