"""Sampling against a float64 reference, row by row and in any company."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling import Draw, Drawn, row_key, sample
from chairlift.engine.sampling.filters import uniform, weights

MANY = settings(max_examples=200, deadline=None, derandomize=True, database=None)
GREEDY = SamplingParams(temperature=0)

QUARTERS = st.integers(-24, 24).map(lambda number: number / 4)
"""Logits on a grid: plenty of ties, and thresholds that float32 and float64 agree on."""

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.25, 0.5, 1.0, 2.0)),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from((1.0, 1.0, 0.999, 0.9, 0.5, 0.31, 0.01)),
    min_p=st.sampled_from((0.0, 0.0, 0.03, 0.3, 0.9, 1.0)),
    logprobs=st.sampled_from((None, 0, 1, 5, 20)),
)


def draw_of(params: SamplingParams, seed: int = 0, count: int = 0) -> Draw:
    return Draw(params, row_key(seed), count)


def kept(logits: Sequence[float], params: SamplingParams) -> tuple[list[bool], bool]:
    """(which tokens may be drawn, whether float32 could see it otherwise), in float64."""
    heat = np.array(logits, dtype=np.float64) / (params.temperature or 1.0)
    keep = np.ones(len(heat), dtype=bool)
    close = False
    if 0 < params.top_k < len(heat):
        keep &= heat >= np.sort(heat)[-params.top_k]
    if params.top_p < 1:
        weights = np.where(keep, np.exp(heat - heat[keep].max()), 0)
        probs = weights / weights.sum()
        order = np.argsort(-probs, kind="stable")
        mass = np.cumsum(probs[order])
        close = bool((np.abs(mass - params.top_p) < 1e-6).any())
        last = order[min(int((mass < params.top_p).sum()), len(order) - 1)]
        keep &= probs >= probs[last] * (1 - 1e-12)
    if params.min_p > 0:
        limit = heat[keep].max() + math.log(params.min_p)
        close |= bool((np.abs(heat - limit) < 1e-5).any()) and params.min_p < 1
        keep &= heat >= limit
    return keep.tolist(), close


@MANY
@given(st.lists(QUARTERS, min_size=1, max_size=12), PARAMS)
def test_filters_keep_what_the_reference_keeps(logits: list[float], params: SamplingParams) -> None:
    assume(not params.greedy)
    want, close = kept(logits, params)
    got = np.array(weights(mx.array([logits], dtype=mx.float32), [params]))[0]
    assert (got > 0).tolist() == want or close
    heat = np.array(logits) / params.temperature
    probs = np.exp(heat) / np.exp(heat).sum()
    np.testing.assert_allclose(got[got > 0], probs[got > 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"top_k": 1}, [0, 3]),
        ({"top_k": 3}, [0, 1, 3, 4]),
        ({"top_p": 0.2}, [0, 3]),
        ({"min_p": 1.0}, [0, 3]),
        ({"top_k": 3, "min_p": 0.9}, [0, 3]),
        ({"top_k": 3, "top_p": 0.99}, [0, 1, 3, 4]),
    ],
)
def test_ties_are_kept(params: dict[str, float], want: list[int]) -> None:
    logits = mx.array([[2.0, 1.0, 0.0, 2.0, 1.0]])
    left = np.array(weights(logits, [SamplingParams(**params)]))[0]  # type: ignore[arg-type]
    assert np.flatnonzero(left).tolist() == want


def rows_of(drawn: Drawn, row: int, wanted: int | None) -> tuple[object, ...]:
    """All that one row gets to see."""
    if wanted is None:
        return drawn.tokens[row].item(), drawn.valid[row].item()
    assert drawn.logprobs is not None
    at = drawn.scored.index(row)
    tops: tuple[object, ...] = ()
    if wanted and drawn.top_tokens is not None and drawn.top_logprobs is not None:
        tops = (drawn.top_logprobs[at, :wanted].tolist(),)
    return drawn.tokens[row].item(), drawn.valid[row].item(), drawn.logprobs[at].item(), *tops


@settings(MANY, max_examples=60)
@given(st.lists(PARAMS, min_size=2, max_size=6), st.integers(0, 2**32))
def test_a_row_draws_the_same_in_any_company(params: list[SamplingParams], seed: int) -> None:
    numbers = np.random.default_rng(seed).normal(size=(len(params), 50)) * 3
    logits = mx.array(numbers.astype(np.float32))
    draws = [draw_of(param, seed + row, row) for row, param in enumerate(params)]
    together = sample(logits, draws)
    for row, draw in enumerate(draws):
        wanted = draw.sampling.logprobs
        alone = sample(logits[row : row + 1], [draw])
        assert rows_of(together, row, wanted) == rows_of(alone, 0, wanted)


def test_rows_in_another_order_draw_the_same() -> None:
    logits = mx.random.normal((16, 100), key=mx.random.key(1))
    params = [SamplingParams(temperature=1 + row / 16, top_p=0.5 + row / 32) for row in range(16)]
    draws = [draw_of(param, row, 7) for row, param in enumerate(params)]
    order = [(7 * row) % 16 for row in range(16)]
    first = np.array(sample(logits, draws).tokens)
    second = np.array(sample(logits[mx.array(order)], [draws[row] for row in order]).tokens)
    assert second.tolist() == first[order].tolist()


@MANY
@given(st.lists(QUARTERS, min_size=1, max_size=300), PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**33))
def test_the_draw_is_where_the_share_falls(
    logits: list[float], params: SamplingParams, seed: int, count: int
) -> None:
    """Against running sums in float64."""
    draw = draw_of(params, seed, count)
    token: int = sample(mx.array([logits], dtype=mx.float32), [draw]).tokens.item()  # type: ignore[assignment]
    if params.greedy:
        assert token == int(np.argmax(logits))
        return
    keep, close = kept(logits, params)
    heat = np.array(logits) / params.temperature
    running = np.cumsum(np.where(keep, np.exp(heat - heat.max()), 0))
    share = uniform(draw.key, count, b"token") * running[-1]
    assert close or keep[token]
    assert (
        close or token == int((running <= share).sum()) or np.abs(running - share).min() < 1e-5 * running[-1]
    )


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**33), st.sampled_from([b"token", b"xtc"]))
def test_a_share_is_a_hash_of_what_names_the_draw(seed: int, count: int, purpose: bytes) -> None:
    """Anew from its definition: whatever is kept between two draws of a row, a seed's answer stays."""
    key = row_key(seed)
    words = b"".join(word.to_bytes(8, "little") for word in (*key, count))
    digest = hashlib.blake2b(words, digest_size=8, person=purpose).digest()
    assert uniform(key, count, purpose) == (int.from_bytes(digest, "little") >> 11) / 2**53


def test_a_row_without_top_p_keeps_what_rounds_to_nothing_in_any_company() -> None:
    """Tokens of 1e-12 beside one of nearly 1: a sum of all reaches 1 without them."""
    logits = np.zeros((3, 20_000), dtype=np.float32)
    logits[:, 7] = 30.0
    settings = [SamplingParams(top_k=50), SamplingParams(top_k=30, top_p=0.5), SamplingParams()]
    logits[:, :60] += np.linspace(0, 1, 60, dtype=np.float32)
    together = np.array(weights(mx.array(logits), settings))
    for row, params in enumerate(settings):
        alone = np.array(weights(mx.array(logits[row : row + 1]), [params]))
        assert (together[row] == alone[0]).all()
    assert [(part > 0).sum() for part in together] == [50, 1, 20_000]


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_k": 5, "top_p": 0.6}, {"top_p": 0.6}, {"top_k": 35}])
def test_filters_over_vocabularies_of_many_blocks(vocab: int, params: dict[str, float]) -> None:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    got = np.array(weights(mx.array(logits[None]), [settings]))[0] > 0
    want, close = kept(logits.tolist(), settings)
    assert not close and got.tolist() == want


def chi_square(tokens: Sequence[int], probs: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(probs))
    expected = probs * len(tokens)
    live = expected > 0
    assert counts[~live].sum() == 0
    return float(((counts[live] - expected[live]) ** 2 / expected[live]).sum())


LOGITS = [1.0, 0.0, -0.5, 2.0, 1.5, 0.25, -1.0, 0.75]
DRAWS = 4000
CHI_SQUARE = 30.0
"""7 degrees of freedom: exceeded once in 10,000 times by chance. The seeds are fixed."""


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("by", ["count", "seed"])
def test_tokens_come_as_often_as_they_should(params: dict[str, float], by: str) -> None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    draws = [draw_of(sampling, *((5, n) if by == "count" else (n, 5))) for n in range(DRAWS)]
    tokens: list[int] = sample(mx.broadcast_to(mx.array(LOGITS), (DRAWS, 8)), draws).tokens.tolist()  # type: ignore[assignment]
    heat = np.array(LOGITS) / sampling.temperature
    weights = np.where(kept(LOGITS, sampling)[0], np.exp(heat), 0)
    assert chi_square(tokens, weights / weights.sum()) < CHI_SQUARE


def test_tokens_one_after_the_other_are_independent() -> None:
    draws = [draw_of(SamplingParams(), 11, n) for n in range(2 * DRAWS)]
    logits = mx.broadcast_to(mx.array([0.0, 0.5, 1.0]), (2 * DRAWS, 3))
    tokens = np.array(sample(logits, draws).tokens)
    probs = np.exp([0, 0.5, 1]) / np.exp([0, 0.5, 1]).sum()
    pairs = tokens[0::2] * 3 + tokens[1::2]
    assert chi_square(pairs.tolist(), np.outer(probs, probs).ravel()) < CHI_SQUARE


def test_keys_of_seeds_are_fixed_and_differ() -> None:
    """Fixed: a seed draws the same tokens after an upgrade."""
    assert row_key(0) == (128274514, 242521337)
    assert row_key(2**64 - 1) == row_key(2**64 - 1)
    assert len({row_key(seed) for seed in (-(2**63), -1, *range(1000), 2**63, 2**64 - 1)}) == 1004


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38, 1e-39, 1e-45, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = mx.array([[1.0, -3.0, 4.0, 3.9], [-2.0, -1.0, -5.0, -1.5]])
    for count in range(20):
        draws = [draw_of(SamplingParams(temperature=temperature), 3, count)] * 2
        assert sample(logits, draws).tokens.tolist() == [2, 1]


@pytest.mark.parametrize("top_p", [1e-6, 1e-40, 1e-46, 1e-300])
def test_a_top_p_near_zero_keeps_the_first(top_p: float) -> None:
    params = SamplingParams(top_p=top_p)
    logits = mx.array([[1.0, 1.2, 1.1]])
    assert {sample(logits, [draw_of(params, 1, n)]).tokens.item() for n in range(20)} == {1}


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_extreme_logits(params: dict[str, float]) -> None:
    logits = mx.array([[-1e30, 1e30, -1e30, 9e29], [-mx.inf, 3.0, -mx.inf, -mx.inf]])
    drawn = sample(logits, [draw_of(SamplingParams(logprobs=1, **params))] * 2)  # type: ignore[arg-type]
    assert drawn.tokens.tolist() == [1, 1]
    assert drawn.valid.tolist() == [True, True]
    assert drawn.logprobs is not None and drawn.logprobs.tolist() == [0.0, 0.0]


def test_equal_logits_keep_all_tokens() -> None:
    params = SamplingParams(top_k=2, top_p=0.1, min_p=1.0)
    logits = mx.zeros((200, 3))
    draws = [draw_of(params, 1, count) for count in range(200)]
    assert set(sample(logits, draws).tokens.tolist()) == {0, 1, 2}  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 50, "top_p": 0.5, "min_p": 0.5}])
def test_a_vocabulary_of_one(params: dict[str, float]) -> None:
    drawn = sample(mx.array([[-7.0]]), [draw_of(SamplingParams(logprobs=20, **params))])  # type: ignore[arg-type]
    assert drawn.tokens.tolist() == [0]
    assert drawn.logprobs is not None and drawn.logprobs.tolist() == [0.0]
    assert drawn.top_tokens is not None and drawn.top_tokens.tolist() == [[0]]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, top_k=2, min_p=0.1)])
def test_only_rows_without_a_distribution_are_invalid(params: SamplingParams) -> None:
    nan, inf = mx.nan, mx.inf
    logits = mx.array([[1.0, nan, 2.0], [1.0, -inf, 2.0], [1.0, inf, 2.0], [-inf] * 3, [5.0, 1.0, 1.0]])
    assert sample(logits, [draw_of(params)] * 5).valid.tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_logprobs_are_the_models_own(dtype: mx.Dtype) -> None:
    """Unfiltered and at temperature 1, whatever the row draws with; the most probable first."""
    logits = (mx.random.normal((4, 300), key=mx.random.key(3)) * 4).astype(dtype)
    params = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=1.7, top_k=4, logprobs=20),
        SamplingParams(temperature=1.7, logprobs=0),
        SamplingParams(temperature=1.7),
    ]
    drawn = sample(logits, [draw_of(param, row) for row, param in enumerate(params)])
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    assert drawn.logprobs is not None
    assert drawn.top_tokens is not None and drawn.top_logprobs is not None
    assert drawn.scored == (0, 1, 2)
    tokens, exact = np.array(drawn.tokens)[:3], exact[:3]
    np.testing.assert_allclose(np.array(drawn.logprobs), exact[np.arange(3), tokens], atol=1e-5)
    top = np.array(drawn.top_tokens)
    assert top.shape == (3, 20)
    np.testing.assert_allclose(
        np.array(drawn.top_logprobs), np.take_along_axis(exact, top, axis=1), atol=1e-5
    )
    np.testing.assert_allclose(np.array(drawn.top_logprobs), -np.sort(-exact, axis=1)[:, :20], atol=1e-5)
    assert all(len(set(row)) == 20 for row in top.tolist())


def test_logprobs_are_computed_where_asked_for() -> None:
    logits = mx.zeros((2, 5))
    drawn = sample(logits, [draw_of(GREEDY)] * 2)
    assert (drawn.logprobs, drawn.top_tokens, drawn.top_logprobs) == (None, None, None)
    assert len(drawn.arrays) == 2
    drawn = sample(logits, [draw_of(SamplingParams(logprobs=0)), draw_of(GREEDY)])
    assert drawn.logprobs is not None and drawn.top_tokens is None
    drawn = sample(logits, [draw_of(SamplingParams(logprobs=20)), draw_of(GREEDY)])
    assert drawn.top_tokens is not None and drawn.top_tokens.shape == (1, 5)
    assert len(drawn.arrays) == 5
