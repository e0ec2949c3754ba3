"""What cannot fit is refused before the tokenizer, which everybody shares, sees it."""

from __future__ import annotations

import pytest

from chairlift.server.validation import MOST_CHARACTERS
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, error_of, lift

CONTEXT = 100
TOO_LONG = "a" * (CONTEXT * MOST_CHARACTERS + 1)


class Sparing(FakeTokenizer):
    """Refuses to work on more than a context can hold."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < len(TOO_LONG)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        assert len(token_ids) <= CONTEXT
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TOO_LONG, "prompt"),
        (["short", TOO_LONG], "prompt[1]"),
        ([97] * (CONTEXT + 1), "prompt"),
        ([[97], [97] * 2000], "prompt[1]"),
    ],
)
async def test_completions(prompt: object, param: str) -> None:
    async with lift(tokenizer=Sparing(), context_length=CONTEXT) as server:
        error = error_of(await server.complete(prompt=prompt, echo=True), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": TOO_LONG}],
        [{"role": "user", "content": [{"type": "text", "text": TOO_LONG}]}],
        [{"role": "user", "content": TOO_LONG[: len(TOO_LONG) // 2 + 1]}] * 2,
    ],
)
async def test_chat(messages: list[JSON]) -> None:
    async with lift(tokenizer=Sparing(), context_length=CONTEXT) as server:
        error = error_of(await server.chat(messages=messages), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_what_may_fit_is_counted_in_tokens() -> None:
    async with lift(FakeRunner(answering("a")), tokenizer=Sparing(), context_length=CONTEXT) as server:
        error = error_of(await server.complete(prompt="a" * (CONTEXT + 1)), 400)
        assert "101 tokens" in str(error["message"])
        assert (await server.complete(prompt=[97] * (CONTEXT - 1))).status_code == 200
