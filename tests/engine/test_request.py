"""What a request may ask for has bounds where more would cost everybody else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from chairlift.engine.engine import Engine
from chairlift.engine.errors import ContextLengthExceeded, InvalidParameter
from chairlift.engine.request import (
    MAX_BIASES,
    MAX_REPETITION,
    MAX_STOP_LENGTH,
    Request,
    SamplingParams,
)
from tests.fakes import fake_model


def test_stop_strings_are_bounded_in_length() -> None:
    assert SamplingParams(stop=("a" * MAX_STOP_LENGTH,)).stop == ("a" * MAX_STOP_LENGTH,)
    with pytest.raises(InvalidParameter, match="1025 characters; at most 1024") as error:
        SamplingParams(stop=("a", "b" * (MAX_STOP_LENGTH + 1)))
    assert error.value.param == "stop"


def test_stop_tokens_are_kept_once_and_in_order() -> None:
    assert SamplingParams(stop_token_ids=(5, 3, 5, 3, 4)).stop_token_ids == (5, 3, 4)
    with pytest.raises(InvalidParameter):
        SamplingParams(stop_token_ids=(1, True))


class Unread(tuple[int, ...]):
    """Token ids that nobody may look at one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read")


async def test_a_prompt_over_the_context_is_refused_by_its_length() -> None:
    engine = Engine(fake_model(context_length=10))
    await engine.start()
    try:
        with pytest.raises(ContextLengthExceeded, match="11 tokens"):
            engine.submit(Request("long", Unread([1] * 11)))
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("frequency_penalty", (-2, 0, 2.0)),
        ("presence_penalty", (-2.0, 2)),
        ("repetition_penalty", (1e-300, 1, MAX_REPETITION)),
        ("xtc_probability", (0, 1)),
        ("xtc_threshold", (0, 0.5)),
        ("logit_bias", ({}, {0: -100, 5: 100.0}, dict.fromkeys(range(MAX_BIASES), 1))),
        ("allowed_token_ids", (None, (0,), (5, 5))),
        ("min_tokens", (0, 8)),
    ],
)
def test_settings_within_their_bounds(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        SamplingParams(max_tokens=8, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("frequency_penalty", (-2.1, 2.1, math.nan, "1", True, None)),
        ("presence_penalty", (3, -math.inf, [])),
        ("repetition_penalty", (0, -1, 101, math.inf)),
        ("xtc_probability", (-0.1, 1.1)),
        ("xtc_threshold", (-0.1, 0.51)),
        ("logit_bias", ({0: 100.1}, {-1: 0}, {"5": 1}, {1.0: 1}, {5: "1"}, dict.fromkeys(range(1025), 1))),
        ("allowed_token_ids", ((), (-1,), (1.5,), ("a",))),
        ("min_tokens", (-1, 9, 1.0, True)),
    ],
)
def test_settings_beyond_their_bounds_are_refused_by_name(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidParameter) as error:
            SamplingParams(max_tokens=8, **{field: value})  # type: ignore[arg-type]
        assert error.value.param == field and field in error.value.message, value


def test_biases_are_the_requests_own() -> None:
    """Changing the mapping afterwards changes nothing."""
    biases = {5: 1.0}
    sampling = SamplingParams(logit_bias=biases)
    biases[6] = 2.0
    assert sampling.logit_bias == {5: 1.0}
    assert sampling == SamplingParams(logit_bias={5: 1.0}) != SamplingParams(logit_bias={5: 2.0})
    assert hash(sampling) == hash(SamplingParams(logit_bias={5: 1.0}))


def test_plain_settings_shape_nothing() -> None:
    """Rows with them cost nothing beside the draw."""
    plain = SamplingParams(temperature=0.5, top_p=0.9, stop="a", stop_token_ids=(1,), seed=3, logprobs=2)
    assert not plain.shapes_logits and not plain.counts_tokens
    assert SamplingParams(min_tokens=1).shapes_logits and not SamplingParams(min_tokens=1).counts_tokens
    assert SamplingParams(repetition_penalty=1.1).counts_tokens
