"""xtc: by hand, as often as asked for, and against mlx-lm's own."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_xtc

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling import Draw, row_key, sample
from chairlift.engine.sampling.filters import exclude_top, excludes

PROBS = (0.4, 0.25, 0.15, 0.12, 0.05, 0.03)


def left(threshold: float, spared: tuple[int, ...] = (), probs: tuple[float, ...] = PROBS) -> list[int]:
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold)
    return np.flatnonzero(np.array(exclude_top(mx.array([probs]), [params], [spared]))[0]).tolist()


@pytest.mark.parametrize(
    ("threshold", "spared", "want"),
    [
        (0.1, (), [3, 4, 5]),
        (0.2, (), [1, 2, 3, 4, 5]),
        (0.3, (), [0, 1, 2, 3, 4, 5]),  # one above: it is the least of them
        (0.5, (), [0, 1, 2, 3, 4, 5]),  # none above
        (0.1, (0, 2), [0, 2, 3, 4, 5]),
        (0.0, (), [5]),
        (0.1, (5, 99), [3, 4, 5]),  # what is beyond the vocabulary is passed over
    ],
)
def test_all_but_the_least_of_the_likely_tokens_go(
    threshold: float, spared: tuple[int, ...], want: list[int]
) -> None:
    assert left(threshold, spared) == want


def test_shares_are_of_what_other_filters_left() -> None:
    """0.1 of a whole of 0.5 is not above a threshold of 0.25, 0.2 is."""
    assert left(0.25, probs=(0.2, 0.2001, 0.0999, 0.0, 0.0)) == [0, 2]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Upstream's function compiles itself at each new threshold, which takes seconds on a CPU."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.3])
def test_it_leaves_what_upstream_leaves(threshold: float, uncompiled: None) -> None:
    logits = mx.random.normal((1, 60), key=mx.random.key(4)) * 2
    upstream = np.array(apply_xtc(logits, 1.0, threshold, [3, 7]))[0]
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold)
    ours = np.array(exclude_top(mx.softmax(logits, axis=-1), [params], [(3, 7)]))[0]
    assert (ours > 0).tolist() == (upstream > -np.inf).tolist()


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_it_strikes_as_often_as_asked_for(probability: float) -> None:
    params = SamplingParams(xtc_probability=probability)
    struck = [excludes(params, row_key(seed), count) for seed in range(40) for count in range(100)]
    assert abs(np.mean(struck) - probability) < 4 * np.sqrt(probability * (1 - probability) / 4000) + 1e-12


def test_draws_with_and_without_it_come_together() -> None:
    """Rows in which it strikes never draw the first token, others and greedy ones do."""
    logits = mx.log(mx.array([PROBS] * 3))
    settings = [
        SamplingParams(xtc_probability=1.0),
        SamplingParams(),
        SamplingParams(temperature=0, xtc_probability=1.0),
    ]
    drawn = np.array(
        [
            sample(logits, [Draw(params, row_key(row), count) for row, params in enumerate(settings)]).tokens
            for count in range(60)
        ]
    )
    assert set(drawn[:, 0].tolist()) == {3, 4, 5}
    assert {0, 1} < set(drawn[:, 1].tolist())
    assert set(drawn[:, 2].tolist()) == {0}


def test_whether_it_strikes_says_nothing_of_the_token() -> None:
    """The draw's number is another one."""
    params = SamplingParams(xtc_probability=0.5, xtc_threshold=0.5)  # no token is above the threshold
    logits = mx.broadcast_to(mx.array([0.0, 0.0]), (4000, 2))
    draws = [Draw(params, row_key(seed), 3) for seed in range(4000)]
    tokens = np.array(sample(logits, draws).tokens)
    struck = np.array([excludes(params, draw.key, draw.count) for draw in draws])
    assert abs(tokens[struck].mean() - tokens[~struck].mean()) < 0.07
