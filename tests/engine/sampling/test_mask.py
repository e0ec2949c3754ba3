"""Masks of packed bits, and draws under them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.plan import NewRow
from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling import Draw, Marks, Mask, row_key, sample
from chairlift.engine.sampling.mask import expanded, masked
from tests.engine.sampling.test_draw import PARAMS, draw_of

WORDS = st.integers(0, 2**32 - 1)


def bits(*rows: list[int]) -> mx.array:
    return mx.array(np.array(rows, dtype=np.uint32))


def packed(allowed: set[int], words: int) -> list[int]:
    return [sum(1 << bit for bit in range(32) if word * 32 + bit in allowed) for word in range(words)]


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=1, max_size=3), st.integers(1, 120))
def test_bits_become_tokens(rows: list[list[int]], vocab: int) -> None:
    want = [
        [token < 96 and bool(row[token // 32] >> (token % 32) & 1) for token in range(vocab)] for row in rows
    ]
    assert expanded(bits(*rows), vocab).tolist() == want


def test_other_rows_pass_unchanged() -> None:
    logits = mx.random.normal((4, 40), key=mx.random.key(1))
    result = masked(logits, Mask((1, 3), bits(packed({0, 39}, 2), packed({5}, 2))))
    assert (result[0] == logits[0]).all() and (result[2] == logits[2]).all()
    assert mx.isfinite(result).astype(mx.int32).sum(axis=-1).tolist() == [40, 2, 40, 1]
    assert result[1, 39].item() == logits[1, 39].item() and result[3, 5].item() == logits[3, 5].item()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(-40, 40), min_size=33, max_size=40),
    st.sets(st.integers(0, 32), min_size=1),
    PARAMS,
    st.integers(0, 2**32),
)
def test_what_a_mask_leaves_out_is_never_drawn(
    values: list[int], allowed: set[int], params: SamplingParams, seed: int
) -> None:
    """Whatever the settings: the draw equals that from logits in which only the allowed tokens exist."""
    logits = mx.array([values, values], dtype=mx.float32) / 4
    draws = [draw_of(params, seed), draw_of(params, seed + 1)]
    drawn = sample(logits, draws, Mask((1,), bits(packed(allowed, 2))))
    assert drawn.left is not None and drawn.left.tolist() == [True, True] == drawn.valid.tolist()
    assert drawn.tokens[1].item() in allowed
    assert drawn.tokens[0].item() == sample(logits[:1], draws[:1]).tokens[0].item()
    kept = mx.array([[token in allowed for token in range(len(values))]])
    alone = sample(mx.where(kept, logits[1:], -mx.inf), draws[1:])
    assert drawn.tokens[1].item() == alone.tokens[0].item()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logit_bias={3: 100}),
        SamplingParams(temperature=2, top_k=1, logit_bias={3: 100}),
        SamplingParams(temperature=1, top_p=0.01, presence_penalty=-2),
        SamplingParams(temperature=0, min_tokens=5),
    ],
)
def test_shaping_does_not_bring_a_forbidden_token_back(params: SamplingParams) -> None:
    """And where the mask leaves nothing but an end that min_tokens bans, the end is drawn."""
    logits = mx.array([[0.0, 1.0, 2.0, 9.0]])
    shaping = Marks(frozenset({2})).shaping(NewRow(1, params, 0, known=(3, 3), drawn=1))
    drawn = sample(logits, [Draw(params, row_key(0), 0, shaping)], Mask((0,), bits([0b100])))
    assert drawn.tokens.tolist() == [2] and drawn.valid.tolist() == [True]


def test_log_probabilities_are_the_models_own() -> None:
    logits = mx.array([[0.0, 1.0, 2.0]])
    params = SamplingParams(temperature=0, logprobs=1)
    drawn = sample(logits, [draw_of(params)], Mask((0,), bits([0b001])))
    assert drawn.tokens.tolist() == [0] and drawn.logprobs is not None and drawn.top_tokens is not None
    assert abs(drawn.logprobs[0].item() - (0 - np.log(np.exp([0, 1, 2]).sum()))) < 1e-6
    assert drawn.top_tokens.tolist() == [[2]]


def test_rows_that_nothing_is_left_for_are_told() -> None:
    logits = mx.array([[0.0, 1.0], [0.0, float("nan")], [0.0, -float("inf")]])
    params = SamplingParams(temperature=1)
    only = Marks().shaping  # allowed_token_ids and the mask have nothing in common
    narrow = SamplingParams(allowed_token_ids=(0,))
    draws = [
        Draw(narrow, row_key(0), 0, only(NewRow(1, narrow, 0))),
        draw_of(params),
        draw_of(params),
    ]
    drawn = sample(logits, draws, Mask((0, 1, 2), bits([0b10], [0b01], [0b10])))
    assert drawn.valid.tolist() == [True, False, True]
    assert drawn.left is not None and drawn.left.tolist()[0::2] == [False, False]
