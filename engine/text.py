"""From tokens to text, one token at a time: characters in flight, stop strings, the end of an answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chairlift.engine.plan import Tokenizer
from chairlift.engine.request import SamplingParams

UNFINISHED = "\ufffd"
"""What a tokenizer gives for bytes that are no whole character, or not yet one."""
MOST_UNFINISHED = 3
"""Bytes of a UTF-8 character that is not yet whole; a decoder gives at most one U+FFFD for each."""
WINDOW = 8
"""Tokens decoded anew with each token, about: context for tokenizers whose text depends on what precedes."""
MOST_WINDOW = 32
"""Tokens that are decoded anew for each token at most, when they form no character at all."""


class Detokenizer:
    """The text of a growing list of tokens.

    Concatenated, what `add` and at the end `flush` return is `decode` of all tokens. A character whose bytes
    come in several tokens is held until it is whole; bytes that never become one come out as U+FFFD, as
    `decode` gives them.

    Method: the last few tokens are decoded again with each new one, and what is new of their text is sent.
    The window begins at a border between characters (the prefix and read offsets of Hugging Face's
    text-generation-inference).

    Args:
        visible: special tokens whose text is part of the answer's; that of the others is left out.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A tokenizer leaves out all special tokens or none.
        self._hidden = frozenset(tokenizer.special_tokens.values()).difference(visible) if visible else None
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text already returned
        self._border = 0  # tokens of the window whose text was whole, when last it was
        self._earlier_border = 0  # the border before that

    def add(self, token: int) -> str:
        """Text that this token completes; often the token's own, possibly empty."""
        if self._hidden is not None and token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        whole = self._whole(text)
        new = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if whole == len(text):
            self._earlier_border, self._border = self._border, len(self._window)
            if len(self._window) > WINDOW:
                self._shorten(self._earlier_border, held=0)
        elif len(self._window) > MOST_WINDOW:
            self._shorten(len(self._window) - WINDOW, held=len(text) - whole)
        return new

    def flush(self) -> str:
        """What is still held: at the end of the answer it is as whole as it will be."""
        text = self._decode(self._window)
        new = text[self._sent :]
        self._sent = len(text)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._hidden is None)

    def _whole(self, text: str) -> int:
        """Characters of the window's text that no later token can change."""
        if not text.endswith(UNFINISHED):
            return len(text)
        run = len(text.rstrip(UNFINISHED))
        if len(self._window) - self._border <= MOST_UNFINISHED:
            return run
        return max(run, len(text) - MOST_UNFINISHED)

    def _shorten(self, start: int, *, held: int) -> None:
        """Drop the first `start` tokens of the window, unless what stays has no text to be context."""
        rest = self._window[start:]
        text = self._decode(rest)
        if len(text) > held or len(self._window) > 2 * MOST_WINDOW:
            self._window = rest
            self._sent = max(0, len(text) - held)
            self._border = max(0, self._border - start)
            self._earlier_border = 0


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    The match that is complete first wins; of those complete at the same character the longest. So the
    outcome is the same however the text is cut into pieces. Knuth, Morris and Pratt's automaton for each
    string: the cost of a character does not depend on the strings' lengths.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(set(strings), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)  # length of the longest prefix that ends the text so far
        self._held = ""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def feed(self, text: str, *, passing: bool = False) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string found). After a match nothing more may be fed.

        Held back is only the longest end of the text that may still become a stop string.

        Args:
            passing: a stop string that ends in this text does not count.
        """
        if not self._strings:
            return text, None
        start = len(self._held)
        text = self._held + text
        for position in range(start, len(text)):
            found = self._step(text[position])
            if found is not None and not passing:
                self._held = ""
                return text[: position + 1 - len(found)], found
        safe = len(text) - max(self._matched)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What is held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found = None
        for index, string in enumerate(self._strings):
            matched = self._matched[index]
            while matched and string[matched] != character:
                matched = self._borders[index][matched - 1]
            matched += string[matched] == character
            self._matched[index] = matched
            if matched == len(string):
                found = found or string
                self._matched[index] = self._borders[index][-1]
        return found


class AnswerText:
    """The text of one answer, and whether its tokens or its text end it."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, visible: Collection[int] = ()) -> None:
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= tokenizer.eos_token_ids
        self._ends = frozenset(ends)
        self._detokenizer = Detokenizer(tokenizer, visible)
        self._stops = StopStrings(sampling.stop)
        self._passing = sampling.min_tokens
        self.stop: str | int | None = None
        """The stop string or token that ended the answer."""

    def may_end(self, token: int) -> bool:
        """Whether the answer may end with this token, the next one. True where only its text says."""
        return bool(self._stops) or token in self._ends

    def add(self, token: int, *, last: bool = False) -> str:
        """Text that the token completes, without a stop token or stop string and what follows it.

        Args:
            last: the answer ends with this token in any case, so nothing is held back.
        """
        passing = self._passing > 0
        self._passing -= passing
        if token in self._ends:
            self.stop = token
            return self._finish("", passing)
        text = self._detokenizer.add(token)
        if last:
            return self._finish(text, passing)
        safe, found = self._stops.feed(text, passing=passing)
        self.stop = found
        return safe

    def _finish(self, text: str, passing: bool) -> str:
        safe, found = self._stops.feed(text + self._detokenizer.flush(), passing=passing)
        if found is not None:
            self.stop = found
            return safe
        return safe + self._stops.flush()


def _borders(string: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        length += string[index] == string[length]
        borders[index] = length
    return borders
