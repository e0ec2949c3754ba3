"""What a request may ask for has bounds where more would cost everybody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.engine.engine import Engine
from chairlift.engine.errors import ContextLengthExceeded, InvalidParameter
from chairlift.engine.request import MAX_STOP_LENGTH, Request, SamplingParams
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
