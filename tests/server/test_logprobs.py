"""Log probabilities in both of OpenAI's forms. The fake draws each token at -0.5, others at 1 lower each."""

from __future__ import annotations

import math

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers.pre_tokenizers import ByteLevel

from chairlift.engine.events import TokenLogprob
from chairlift.server.logprobs import (
    ALPHABET,
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    written_bytes,
)
from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.harness import error_of, lift, stream_of


async def test_chat() -> None:
    async with lift(FakeRunner(answering("aä"))) as server:
        body = (await server.chat(logprobs=True, top_logprobs=2)).json()
        chunks = stream_of(await server.chat(logprobs=True, top_logprobs=2, stream=True))
        bare = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    choice = ChatCompletion.model_validate(body, strict=True).choices[0]
    assert choice.logprobs and choice.logprobs.content
    first, half, _, end = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("a", [97], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.5), ("b", -1.5)]
    assert (half.token, half.bytes) == ("\ufffd", [0xC3])
    assert end.token == "</s>"
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 4
    streamed = [
        entry.model_dump(exclude_unset=True)
        for chunk in chunks
        for choice in ChatCompletionChunk.model_validate(chunk, strict=True).choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert streamed == body["choices"][0]["logprobs"]["content"]


async def test_completions() -> None:
    async with lift(FakeRunner(answering("abc"))) as server:
        body = (await server.complete(logprobs=2)).json()
        chunks = stream_of(await server.complete(logprobs=2, stream=True))
        bare = (await server.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        without = (await server.complete(logprobs=False)).json()["choices"][0]["logprobs"]
    logprobs = Completion.model_validate(body, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c", "</s>"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs and logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert bare["top_logprobs"][0] == {"a": -0.5}
    assert without is None
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]  # type: ignore[attr-defined]
    for key, whole in body["choices"][0]["logprobs"].items():
        assert [entry for part in parts for entry in part[key]] == whole


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
async def test_what_chat_refuses(more: dict[str, object], param: str) -> None:
    async with lift() as server:
        error = error_of(await server.chat(**more), 400)
    assert error["param"] == param and param in str(error["message"])


@pytest.mark.parametrize("value", [True, -1, 21, "1", 1.5])
async def test_what_completions_refuse(value: object) -> None:
    async with lift() as server:
        assert error_of(await server.complete(logprobs=value), 400)["param"] == "logprobs"


class Spaced(FakeTokenizer):
    """Like SentencePiece's: the space at the front of the first token is lost in decoding."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids).removeprefix(" ")


def test_a_tokens_own_space_is_kept() -> None:
    texts = TokenTexts(Spaced())
    assert [texts[ord(" ")], texts[ord("b")], texts[EOS]] == [" ", "b", "</s>"]


@pytest.mark.parametrize(
    ("token", "want"),
    [
        ("<0xE2>", b"\xe2"),
        ("<0x0A>", b"\n"),
        ("<0xe2>", b"<0xe2>"),
        ("\u0120the", b" the"),
        ("\u00e2\u0122", b"\xe2\x80"),
        ("\u00ef\u00bf\u00bd", "\ufffd".encode()),
        ("\u2581the", None),
        ("\u65e5", None),
    ],
)
def test_bytes_as_vocabularies_write_them(token: str, want: bytes | None) -> None:
    assert written_bytes(token) == want


def test_the_alphabet_is_that_of_the_tokenizers() -> None:
    assert set(ALPHABET) == set(ByteLevel.alphabet())
    assert sorted(ALPHABET.values()) == list(range(256))
    encode = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("a b", "\u00e4\n\x00\x7f", "\u65e5\u672c \U0001f6a1", "\u00ad\u00a0\u0100"):
        ((written, _),) = encode.pre_tokenize_str(text)
        assert written_bytes(written) == text.encode()


class Muddled(FakeTokenizer):
    def token_strings(self, token_ids: list[int]) -> list[str]:
        return ["abc" for _ in token_ids]


def test_bytes_that_are_not_the_tokens_are_not_told() -> None:
    texts = TokenTexts(Muddled())
    assert (texts.utf8(97), texts.utf8(0xC3)) == (b"a", None)


def test_values_that_json_does_not_have() -> None:
    texts = TokenTexts(FakeTokenizer())
    tokens = [TokenLogprob(97, -math.inf, ((98, math.nan), (97, -math.inf)))]
    chat = chat_logprobs(tokens, texts)
    assert chat["content"] == [
        {
            "token": "a",
            "logprob": -9999.0,
            "bytes": [97],
            "top_logprobs": [
                {"token": "b", "logprob": -9999.0, "bytes": [98]},
                {"token": "a", "logprob": -9999.0, "bytes": [97]},
            ],
        }
    ]
    completions = completion_logprobs(tokens, texts, TextOffsets(texts))
    assert completions["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]


async def test_what_ends_the_answer_is_listed() -> None:
    """As docs/api.md says: a stop string's tokens, or the stop token, though none is in the text."""
    async with lift(FakeRunner(answering("abcd"))) as server:
        for more, want in (({"stop": "bc"}, "abc"), ({"stop_token_ids": [ord("b")]}, "ab")):
            (chat,) = (await server.chat(logprobs=True, **more)).json()["choices"]
            assert chat["message"]["content"] == "a"
            assert [entry["token"] for entry in chat["logprobs"]["content"]] == list(want)
            chunks = stream_of(await server.complete(logprobs=0, stream=True, **more))
            choices = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
            assert "".join(choice["text"] for choice in choices) == "a"
            tokens = [
                token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]
            ]
            assert tokens == list(want)


async def test_offsets_are_those_of_the_text() -> None:
    """A character that is split over tokens is one, also over the chunks of a stream."""
    async with lift(FakeRunner(answering("aä\U000218a3b"))) as server:
        (choice,) = (await server.complete(logprobs=0)).json()["choices"]
        chunks = stream_of(await server.complete(logprobs=0, stream=True))
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert (tokens[-2], choice["text"][offsets[-2]]) == ("b", "b")
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]  # type: ignore[attr-defined]
    assert [offset for part in parts for offset in part["text_offset"]] == offsets
