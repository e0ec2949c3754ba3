"""What rows add to their logits, by hand and against a float64 reference."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling import Draw, Mask, Shaping, row_key, sample
from chairlift.engine.sampling.shaping import BAN, Counted, shaped

MANY = settings(max_examples=80, deadline=None, derandomize=True, database=None)
VOCABULARY = 8


def shaping(
    params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = (), ends: Sequence[int] = (7,)
) -> Shaping | None:
    return Shaping(params, ends, tuple(prompt), tuple(answer)) if params.shapes_logits else None


def logits_of(
    rows: Sequence[Sequence[float]], shapings: Sequence[Shaping | None], count: int = 0
) -> np.ndarray:
    """What is drawn from, in the draw after `count` tokens."""
    array = mx.array(rows, dtype=mx.float32)
    return np.array(shaped(array, shapings, [count] * len(rows), Counted(shapings, array.shape[1])))


def expected(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    ends: Sequence[int] = (7,),
) -> np.ndarray:
    """The same in float64, token by token."""
    values = []
    for token, logit in enumerate(logits):
        value = float(logit) + params.logit_bias.get(token, 0.0)
        if len(answer) < params.min_tokens and token in ends:
            value += BAN
        if token in prompt or token in answer:
            scale = params.repetition_penalty
            value = value / scale if value > 0 else value * scale
        times = list(answer).count(token)
        value -= params.frequency_penalty * times + (params.presence_penalty if times else 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -np.inf
        values.append(value)
    return np.array(values)


def test_frequency_and_presence_by_hand() -> None:
    """OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence. Prompt tokens do not count."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    got = logits_of([[1.0, 2.0, -3.0, 4.0]], [shaping(params, prompt=(3, 0), answer=(1, 1, 2))])
    assert got.tolist() == [[1.0, 2.0 - 2 * 0.5 - 0.25, -3.0 - 0.5 - 0.25, 4.0]]


def test_repetition_by_hand() -> None:
    """Positive logits over it, others times it, of every token of prompt and answer, once."""
    params = SamplingParams(repetition_penalty=2.0)
    got = logits_of([[1.0, 2.0, -3.0, 4.0, -1.0]], [shaping(params, prompt=(1, 1), answer=(2, 3, 3))])
    assert got.tolist() == [[1.0, 1.0, -6.0, 2.0, -1.0]]


def test_all_together_by_hand() -> None:
    """Bias, then repetition, then frequency and presence, then the allowed tokens."""
    params = SamplingParams(
        logit_bias={0: 3.0, 2: -1.0},
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        allowed_token_ids=(0, 2),
    )
    got = logits_of([[1.0, 2.0, -3.0]], [shaping(params, prompt=(0,), answer=(2, 2))])
    assert got.tolist() == [[(1 + 3) / 2, -np.inf, (-3 - 1) * 2 - 2 * 1 - 0.5]]


def test_ends_are_banned_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2)
    row = [[0.0, 1.0, 2.0]]
    for count, banned in [(0, True), (1, True), (2, False), (3, False)]:
        got = logits_of(row, [shaping(params, ends=(1, 2))], count)[0]
        assert (got[1] < -1e24, got[2] < -1e24) == (banned, banned)
        assert got[0] == 0.0


def test_a_ban_gives_way_where_nothing_else_is_left() -> None:
    """A constraint may leave nothing but an end."""
    params = SamplingParams(min_tokens=5, temperature=0)
    mask = Mask((0, 1), mx.array([[0b010], [0b011]], dtype=mx.uint32))
    draws = [Draw(params, row_key(0), 0, Shaping(params, (1,)))] * 2
    assert sample(mx.array([[9.0, 1.0, 5.0]] * 2), draws, mask).tokens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0, 2.0])
def test_the_ban_holds_at_any_temperature(temperature: float) -> None:
    params = SamplingParams(min_tokens=5, temperature=temperature, repetition_penalty=100.0)
    for count in range(5):
        draw = Draw(params, row_key(1), count, Shaping(params, (1,), (1,), (0,) * count))
        assert sample(mx.array([[-50.0, 80.0]]), [draw]).tokens.tolist() == [0]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 1.0)),
    frequency_penalty=st.sampled_from((0.0, 0.5, -2.0, 2.0)),
    presence_penalty=st.sampled_from((0.0, 0.25, -1.5)),
    repetition_penalty=st.sampled_from((1.0, 1.25, 0.5, 100.0)),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.integers(-100, 100).map(float), max_size=3),
    min_tokens=st.integers(0, 3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4).map(tuple),
)
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=VOCABULARY, max_size=VOCABULARY)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)


@MANY
@given(st.lists(st.tuples(LOGITS, PARAMS, TOKENS, TOKENS), min_size=1, max_size=5))
def test_shaped_logits_are_those_of_the_reference(
    rows: list[tuple[list[float], SamplingParams, list[int], list[int]]],
) -> None:
    shapings = [shaping(params, prompt, answer) for _, params, prompt, answer in rows]
    logits = mx.array([row[0] for row in rows], dtype=mx.float32)
    counts = [len(answer) for *_, answer in rows]
    got = np.array(shaped(logits, shapings, counts, Counted(shapings, VOCABULARY)))
    want = np.stack([expected(*row) for row in rows])
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@settings(MANY, max_examples=40)
@given(
    st.lists(st.tuples(PARAMS, TOKENS, st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
def test_draws_are_counted_on_the_device_whoever_joins_and_leaves(
    rows: list[tuple[SamplingParams, list[int], int, int]], seed: int
) -> None:
    """Rows join at one step and leave at another; every draw is that of a row made anew from its tokens."""
    numbers = np.random.default_rng(seed).normal(size=(10, len(rows), VOCABULARY)) * 3
    keys = [row_key(seed + row) for row in range(len(rows))]
    live = [shaping(params, prompt) for params, prompt, *_ in rows]
    answers: list[list[int]] = [[] for _ in rows]
    for step, logits in enumerate(numbers):
        riding = [row for row, (*_, join, leave) in enumerate(rows) if join <= step < leave]
        if not riding:
            continue
        draws = [Draw(rows[row][0], keys[row], len(answers[row]), live[row]) for row in riding]
        tokens: list[int] = sample(mx.array(logits[riding], dtype=mx.float32), draws).tokens.tolist()  # type: ignore[assignment]
        for row, token in zip(riding, tokens, strict=True):
            params, prompt = rows[row][:2]
            anew = Draw(params, keys[row], len(answers[row]), shaping(params, prompt, answers[row]))
            alone = sample(mx.array(logits[row : row + 1], dtype=mx.float32), [anew])
            assert token == alone.tokens.item()
            answers[row].append(token)


def test_rows_without_settings_are_left_as_they_are() -> None:
    """Bit for bit: also in company, and with tokens that other rows ban or push."""
    logits = np.random.default_rng(5).normal(size=(4, 50)).astype(np.float32)
    params = SamplingParams(
        frequency_penalty=1.0, logit_bias={3: 50.0}, allowed_token_ids=(3, 4), min_tokens=2
    )
    shapings = [None, Shaping(params, (1,), (2,), (3,)), None, Shaping(params, (1,), (2,), (3,))]
    got = np.array(shaped(mx.array(logits), shapings, [1] * 4, Counted(shapings, 50)))
    assert (got[[0, 2]] == logits[[0, 2]]).all()
    assert np.isneginf(got[1][5:]).all() and (got[3][3], got[3][4]) == (logits[3][3] + 50 - 1, logits[3][4])


def test_tokens_beyond_the_logits_are_passed_over() -> None:
    """A tokenizer may know more tokens than the model."""
    params = SamplingParams(
        logit_bias={1: 1.0, 90: 5.0}, repetition_penalty=2.0, allowed_token_ids=(0, 1, 90), min_tokens=1
    )
    got = logits_of([[1.0, 1.0, 1.0]], [shaping(params, prompt=(0, 80), answer=(), ends=(2, 99))])
    assert got.tolist() == [[0.5, 2.0, -np.inf]]


def test_log_probabilities_are_the_models_own() -> None:
    params = SamplingParams(temperature=0, logit_bias={0: 100.0}, logprobs=1)
    draw = Draw(params, row_key(0), 0, Shaping(params))
    drawn = sample(mx.array([[0.0, 1.0]]), [draw])
    assert drawn.tokens.tolist() == [0]
    assert drawn.logprobs is not None and drawn.top_tokens is not None
    np.testing.assert_allclose(drawn.logprobs.tolist(), [-np.log(1 + np.e)], rtol=1e-6)
    assert drawn.top_tokens.tolist() == [[1]]
