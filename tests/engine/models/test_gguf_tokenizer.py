"""Tokenizers rebuilt from GGUF files split text as the original ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.gguf_file import GGUFFile
from chairlift.engine.models.gguf_tokenizer import end_token_ids, tokenizer_description
from tests.engine.models.gguf_files import CONTROL, Llama, Vocabulary, byte_level, sentencepiece


def rebuilt(vocabulary: Vocabulary, folder: Path) -> Tokenizer:
    file = GGUFFile(Llama(vocabulary=vocabulary).write(folder / "t.gguf"))
    return Tokenizer.from_str(json.dumps(tokenizer_description(file)))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return rebuilt(byte_level("smollm"), tmp_path_factory.mktemp("smollm"))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return rebuilt(byte_level("llama-bpe"), tmp_path_factory.mktemp("llama3"))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return rebuilt(sentencepiece(), tmp_path_factory.mktemp("llama2"))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12", ["1", "2"]),  # digits stand alone, although the vocabulary has "12"
        ("the the", ["t", "he", "Ġthe"]),
        ("aa'm", ["aa", "'m"]),
        ("   a", ["ĠĠ", "Ġ", "a"]),  # the last space goes with the word, and "Ġa" is no token
        ("é", ["Ã", "©"]),
        ("中", ["ä", "¸", "Ń"]),
        ("\n\t", ["Ċ", "ĉ"]),
        ("a<|im_end|>1", ["a", "<|im_end|>", "1"]),
        ("a<added>1", ["a", "<added>", "1"]),
    ],
)
def test_smollm_by_hand(smollm: Tokenizer, text: str, tokens: list[str]) -> None:
    assert smollm.encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12", ["<|endoftext|>", "12"]),  # up to three digits together
        ("1212", ["<|endoftext|>", "12", "1", "2"]),  # 121 and 2
        ("'M", ["<|endoftext|>", "'", "M"]),
        ("the the", ["<|endoftext|>", "t", "he", "Ġthe"]),
    ],
)
def test_llama3_by_hand(llama3: Tokenizer, text: str, tokens: list[str]) -> None:
    assert llama3.encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the", ["<s>", "▁the"]),
        (" the", ["<s>", "▁▁", "t", "he"]),  # ▁▁ scores best, so it is joined before ▁the can be
        ("here", ["<s>", "▁", "he", "r", "e"]),  # "he" scores above "er"
        ("n12", ["<s>", "▁", "n", "1", "2"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        ("a</s>a", ["<s>", "▁a", "</s>", "▁a"]),
    ],
)
def test_llama2_by_hand(llama2: Tokenizer, text: str, tokens: list[str]) -> None:
    assert llama2.encode(text).tokens == tokens


TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=("Cs",)), st.sampled_from("  \n\t12'the aér中🧗\u200d♀️\u2028\u00a0")
    ),
    max_size=40,
)


@given(TEXTS)
def test_byte_level_text_comes_back(smollm: Tokenizer, llama3: Tokenizer, text: str) -> None:
    for tokenizer in (smollm, llama3):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(TEXTS.filter(lambda text: "\u2581" not in text))
def test_sentencepiece_text_comes_back(llama2: Tokenizer, text: str) -> None:
    ids = llama2.encode(text, add_special_tokens=False).ids
    assert llama2.decode(ids, skip_special_tokens=False) == text


def test_bos_as_the_file_says(tmp_path: Path) -> None:
    plain = rebuilt(byte_level("smollm"), tmp_path)
    asked = rebuilt(byte_level("smollm", bos=True), tmp_path)
    not_asked = rebuilt(byte_level("llama-bpe", bos=False), tmp_path)
    assert [tokenizer.encode("t").tokens for tokenizer in (plain, asked, not_asked)] == [
        ["t"],
        ["<|endoftext|>", "t"],
        ["t"],
    ]


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    base = byte_level("smollm")
    tokens = [*base.tokens, "<|eot_id|>", "<|end|>"]
    vocabulary = Vocabulary(tokens, [*base.types, CONTROL, 1], {**base.keys, "eot_token_id": 5})
    file = GGUFFile(Llama(vocabulary=vocabulary).write(tmp_path / "t.gguf"))
    # Its eos, its eot, then <|endoftext|> and <|eot_id|> by name; <|end|> is an ordinary token here.
    assert end_token_ids(file) == [1, 5, 0, len(tokens) - 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": None}, "names no pre-tokenizer"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
        ({"merges": ["a b c"]}, "does not join two tokens"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "no type for each token"),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    settings = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    file = GGUFFile(Llama(settings=settings).write(tmp_path / "t.gguf"))
    with pytest.raises(ModelUnavailable, match=message):
        tokenizer_description(file)


def test_sentencepiece_without_scores_is_refused(tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.scores": None}
    file = GGUFFile(Llama(vocabulary=sentencepiece(), settings=settings).write(tmp_path / "t.gguf"))
    with pytest.raises(ModelUnavailable, match="no score for each token"):
        tokenizer_description(file)
