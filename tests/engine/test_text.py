"""Incremental text equals the text of the whole, whatever the tokens and however they come."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift.engine.request import SamplingParams
from chairlift.engine.text import MOST_WINDOW, AnswerText, Detokenizer, StopStrings
from tests.fake_tokenizer import BOS, END, EOS, START, FakeTokenizer

UNFINISHED = "\ufffd"


class Pieces(FakeTokenizer):
    """A vocabulary of byte strings: token id = index; ids beyond it are special tokens without text."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.most_decoded = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.most_decoded = max(self.most_decoded, len(token_ids))
        known = [self.vocabulary[token] for token in token_ids if token < len(self.vocabulary)]
        return b"".join(known).decode(errors="replace")


class ByteFallback(FakeTokenizer):
    """As SentencePiece's byte tokens: in a run that is not valid as a whole each byte gives one U+FFFD."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError:
            return UNFINISHED * len(token_ids)


class LeadingSpace(FakeTokenizer):
    """As SentencePiece: each token is a word with its space, and the text of a list drops the first space."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f" {token}" for token in token_ids)[1:]


def feed(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


texts = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("aé€😀👩\u200d🚀\u0301\u0327\ufe0f\ufffdक्षि한"),
    ),
    max_size=60,
)
anything = st.one_of(
    texts.map(lambda text: text.encode()),
    st.binary(max_size=80),
    st.lists(st.sampled_from([b"\xf0", b"\x9f", b"\x98", b"\xff", b"\xe2\x82", b"a", "€".encode()])).map(
        b"".join
    ),
)
sizes = st.lists(st.integers(0, 7), max_size=60)


class TestDetokenizer:
    @given(anything, sizes)
    @example(b"\xff" * 80, [1] * 80)
    @example(b"\xf0\x9f\x98" * 40, [1] * 120)
    @example(b"\xe2\x82" * 50 + "€".encode(), [1] * 103)
    @example(("😀" * 30).encode(), [1] * 120)
    def test_pieces_join_to_the_whole_text(self, data: bytes, sizes: list[int]) -> None:
        tokenizer = Pieces(cut(data, sizes))
        tokens = list(range(len(tokenizer.vocabulary)))
        assert "".join(feed(Detokenizer(tokenizer), tokens)) == data.decode(errors="replace")

    @given(texts.map(lambda text: text.replace(UNFINISHED, "")), sizes)
    def test_whole_characters_are_never_sent_in_parts(self, text: str, sizes: list[int]) -> None:
        tokenizer = Pieces(cut(text.encode(), sizes))
        pieces = feed(Detokenizer(tokenizer), list(range(len(tokenizer.vocabulary))))
        assert all(UNFINISHED not in piece for piece in pieces)

    @given(texts, sizes)
    def test_a_character_comes_with_the_token_that_completes_it(self, text: str, sizes: list[int]) -> None:
        text = text.replace(UNFINISHED, "")
        tokenizer = Pieces(cut(text.encode(), sizes))
        detokenizer, sent, fed = Detokenizer(tokenizer), "", b""
        for token, piece in enumerate(tokenizer.vocabulary):
            sent += detokenizer.add(token)
            fed += piece
            assert sent == fed.decode(errors="ignore")

    @given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([BOS, EOS, END])), max_size=80))
    def test_special_tokens_have_no_text(self, tokens: list[int]) -> None:
        expected = FakeTokenizer().decode(tokens, skip_special_tokens=True)
        assert "".join(feed(Detokenizer(FakeTokenizer()), tokens)) == expected

    @given(texts)
    def test_a_decoder_that_condemns_a_whole_run_of_bytes(self, text: str) -> None:
        text = text.replace(UNFINISHED, "")
        assert "".join(feed(Detokenizer(ByteFallback()), list(text.encode()))) == text

    def test_such_a_decoder_and_bytes_that_become_nothing(self) -> None:
        assert "".join(feed(Detokenizer(ByteFallback()), [0xFF] * 100)) == UNFINISHED * 100

    @given(st.lists(st.integers(0, 999), max_size=60))
    @example(list(range(200)))
    def test_text_that_depends_on_what_precedes(self, tokens: list[int]) -> None:
        assert "".join(feed(Detokenizer(LeadingSpace()), tokens)) == LeadingSpace().decode(tokens)

    @pytest.mark.parametrize("piece", [b"word", b"\xff", b"\x80\x80", b"\xf0\x9f\x98", b"", "€".encode()])
    def test_the_cost_of_a_token_is_bounded(self, piece: bytes) -> None:
        tokenizer = Pieces([piece])
        detokenizer = Detokenizer(tokenizer)
        text = "".join(feed(detokenizer, [0] * 1000))
        assert text == (piece * 1000).decode(errors="replace")
        assert tokenizer.most_decoded <= 2 * MOST_WINDOW + 1

    def test_the_last_character_is_not_lost(self) -> None:
        detokenizer = Detokenizer(FakeTokenizer())
        assert [detokenizer.add(token) for token in b"a\xf0\x9f"] == ["a", "", ""]
        assert detokenizer.flush() == UNFINISHED
        assert detokenizer.flush() == ""


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The reference: of all occurrences the one that ends first, the longest of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


few = st.text("ab ", max_size=40)
stop_lists = st.lists(st.text("ab ", min_size=1, max_size=6), max_size=4)


class TestStopStrings:
    @given(few, stop_lists, sizes)
    def test_equals_a_search_of_the_whole_text(self, text: str, stops: list[str], sizes: list[int]) -> None:
        matcher, sent, found = StopStrings(stops), "", None
        for piece in cut(text.encode(), sizes):
            safe, found = matcher.feed(piece.decode())
            sent += safe
            if found is not None:
                break
        else:
            sent += matcher.flush()
        assert (sent, found) == first_stop(text, stops)

    @given(few, stop_lists)
    def test_holds_back_only_what_may_become_a_stop_string(self, text: str, stops: list[str]) -> None:
        matcher, fed, sent = StopStrings(stops), "", ""
        for character in text:
            safe, found = matcher.feed(character)
            if found is not None:
                return
            fed, sent = fed + character, sent + safe
            held = max((n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])), default=0)
            assert sent == fed[: len(fed) - held]

    def test_a_match_that_began_earlier_but_ends_later_loses(self) -> None:
        assert StopStrings(["bcd", "c"]).feed("abcd") == ("ab", "c")

    def test_of_matches_that_end_together_the_longest_wins(self) -> None:
        assert StopStrings(["c", "bc"]).feed("abcd") == ("a", "bc")

    def test_without_stop_strings_nothing_is_held(self) -> None:
        matcher = StopStrings([])
        assert matcher.feed("abc") == ("abc", None)
        assert matcher.flush() == ""


def answer(tokens: list[int] | bytes, sampling: SamplingParams) -> tuple[list[str], str | int | None]:
    text = AnswerText(FakeTokenizer(), sampling)
    pieces = []
    for index, token in enumerate(tokens):
        pieces.append(text.add(token, last=index == len(tokens) - 1))
        if text.stop is not None:
            break
    return pieces, text.stop


class TestAnswerText:
    def test_an_end_of_sequence_token_ends_it_and_has_no_text(self) -> None:
        assert answer([*b"ab", EOS, *b"c"], SamplingParams()) == (["a", "b", ""], EOS)

    def test_ignore_eos_goes_on(self) -> None:
        assert answer([*b"a", EOS, *b"c"], SamplingParams(ignore_eos=True)) == (["a", "", "c"], None)

    def test_a_stop_token_counts_even_with_ignore_eos(self) -> None:
        sampling = SamplingParams(ignore_eos=True, stop_token_ids=(EOS, ord("c")))
        assert answer([*b"ac"], sampling) == (["a", ""], ord("c"))
        assert answer([*b"a", EOS], sampling) == (["a", ""], EOS)

    def test_a_stop_string_across_tokens(self) -> None:
        assert answer(b"one END two", SamplingParams(stop=("END",))) == (
            ["o", "n", "e", " ", "", "", ""],
            "END",
        )

    def test_what_was_held_for_a_stop_string_comes_with_the_last_token(self) -> None:
        assert answer(b"xEN", SamplingParams(stop=("END",))) == (["x", "", "EN"], None)
        assert answer([*b"xEN", EOS], SamplingParams(stop=("END",))) == (["x", "", "", "EN"], EOS)

    def test_a_character_cut_off_at_the_end(self) -> None:
        assert answer(b"x\xe2\x82", SamplingParams()) == (["x", "", UNFINISHED], None)
        assert answer([*b"x\xe2", EOS], SamplingParams()) == (["x", "", UNFINISHED], EOS)

    def test_a_stop_string_that_the_last_token_completes(self) -> None:
        assert answer(b"xEND", SamplingParams(stop=("END",))) == (["x", "", "", ""], "END")

    @given(few, stop_lists)
    def test_text_and_stop_equal_the_search(self, text: str, stops: list[str]) -> None:
        pieces, stop = answer(text.encode(), SamplingParams(stop=tuple(stops)))
        assert ("".join(pieces), stop) == first_stop(text, stops)


def answered(tokens: bytes, sampling: SamplingParams) -> tuple[str, str | int | None, int]:
    """(text, what ended it, tokens taken) of one-character tokens, all of which there are."""
    answer = AnswerText(FakeTokenizer(), sampling)
    text = ""
    for at, token in enumerate(tokens, 1):
        text += answer.add(token, last=at == len(tokens))
        if answer.stop is not None:
            return text, answer.stop, at
    return text, None, len(tokens)


@given(
    st.text("ab", min_size=1, max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 16),
)
@example("aaa", ["aa"], 2)  # the second match overlaps the one that does not count
@example("abab", ["ab"], 2)
@example("ab", ["ab"], 2)
def test_no_stop_string_counts_before_min_tokens(text: str, stops: list[str], least: int) -> None:
    sampling = SamplingParams(stop=tuple(stops), min_tokens=least)
    want: tuple[str, str | None, int] = (text, None, len(text))
    for at in range(least + 1, len(text) + 1):
        found = [stop for stop in stops if text[:at].endswith(stop)]
        if found:
            longest = max(found, key=len)
            want = text[: at - len(longest)], longest, at
            break
    assert answered(text.encode(), sampling) == want


class TestVisibleTokens:
    def test_special_tokens_are_left_out_unless_they_are_visible(self) -> None:
        tokens = [*b"a", START, *b"b", END, *b"c", BOS]
        text = AnswerText(FakeTokenizer(), SamplingParams(ignore_eos=True), {START, END})
        assert [text.add(token) for token in tokens] == ["a", "<|im_start|>", "b", "<|im_end|>", "c", ""]
        hidden = AnswerText(FakeTokenizer(), SamplingParams(ignore_eos=True))
        assert [hidden.add(token) for token in tokens] == ["a", "", "b", "", "c", ""]

    def test_stop_strings_see_what_is_visible(self) -> None:
        text = AnswerText(FakeTokenizer(), SamplingParams(stop=("start|>b",)), {START})
        assert [text.add(token) for token in (*b"a", START, *b"b")] == ["a", "<|im_", ""]
        assert text.stop == "start|>b"

    def test_a_character_goes_on_behind_a_hidden_token(self) -> None:
        first, second = "é".encode()
        detokenizer = Detokenizer(FakeTokenizer(), {START})
        assert feed(detokenizer, [first, BOS, second, START]) == ["", "", "é", "<|im_start|>", ""]

    @given(st.lists(st.sampled_from([*"aé€".encode(), BOS, START, END]), max_size=40))
    def test_concatenated_it_is_the_text_of_what_is_visible(self, tokens: list[int]) -> None:
        tokenizer = FakeTokenizer()
        visible = [token for token in tokens if token not in (BOS, EOS, END)]
        assert "".join(feed(Detokenizer(tokenizer, {START}), tokens)) == tokenizer.decode(visible)
