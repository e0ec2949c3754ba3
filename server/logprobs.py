"""Log probabilities as OpenAI writes them, in the chat form and in the older one of completions."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from chairlift.engine.events import TokenLogprob
from chairlift.engine.plan import Tokenizer

LEAST = -9999.0
"""OpenAI's value for a token that is next to impossible. JSON has no -Infinity."""


class TokenTexts:
    """The text of single tokens, each decoded once. Read on the event loop only.

    Decoding one token alone loses the space that many tokenizers keep at a word's front, so each is decoded
    behind an anchor and the anchor's own text is cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = tokenizer.decode(self._anchor)
        self._texts: dict[int, str] = {}

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        return frozenset(self._tokenizer.special_tokens.values())

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            behind = self._tokenizer.decode([*self._anchor, token_id])
            if behind.startswith(self._anchor_text):
                text = behind[len(self._anchor_text) :]
            else:
                text = self._tokenizer.decode([token_id])
            self._texts[token_id] = text
        return text

    def utf8(self, token_id: int) -> bytes | None:
        """Bytes of the text; of a part of a character, whose text is U+FFFD, as the vocabulary writes them.
        None where it does not tell."""
        text = self[token_id]
        if UNFINISHED not in text:
            return text.encode()
        data = written_bytes(self._tokenizer.token_strings([token_id])[0])
        return data if data is not None and data.decode(errors="replace") == text else None


def written_bytes(token: str) -> bytes | None:
    """Of a token as vocabularies write it that hold bytes: SentencePiece's `<0xE2>`, or GPT-2's alphabet, in
    which every byte is a printable character. None for what is neither."""
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(match[1], 16)])
    try:
        return bytes(ALPHABET[character] for character in token)
    except KeyError:
        return None


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


ALPHABET: Mapping[str, int] = MappingProxyType(_alphabet())
UNFINISHED = "\ufffd"


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # a NaN compares as false


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    data = texts.utf8(token_id)
    return {
        "token": texts[token_id],
        "logprob": _finite(logprob),
        "bytes": None if data is None else list(data),
    }


def chat_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, object]:
    content = [
        {
            **_entry(texts, token.token_id, token.logprob),
            "top_logprobs": [_entry(texts, token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where the texts of a choice's tokens begin, in characters of the choice's text. A token within a
    character begins where the character does."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def take(self, token_id: int, length: int | None = None) -> int:
        """That of the next token, of which so many characters stand in the text; None: all."""
        at = self._at
        if length is not None:
            self._at += length
            return at
        data = self._texts.utf8(token_id)
        if data is None:  # a part of a character, nobody knows which: counted as its text shows it
            self._at += len(self._texts[token_id])
        else:
            self._at += len(self._decoder.decode(data))
        return at


def completion_logprobs(
    tokens: Sequence[TokenLogprob], texts: TokenTexts, offsets: TextOffsets
) -> dict[str, object]:
    """The older form. Tokens with equal text share an entry of `top_logprobs`, whose keys are texts: the more
    probable one stands.

    Args:
        offsets: of the choice, which has taken the tokens before these.
    """
    return {
        "tokens": [texts[token.token_id] for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, texts) for token in tokens],
        "text_offset": [offsets.take(token.token_id) for token in tokens],
    }


def _top(token: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        top.setdefault(texts[token_id], _finite(logprob))
    return top


def echoed_logprobs(
    text: str,
    prompt: Sequence[int],
    scored: Sequence[TokenLogprob],
    tokens: Sequence[TokenLogprob],
    texts: TokenTexts,
    offsets: TextOffsets,
) -> dict[str, object]:
    """The older form of a prompt and, behind it, of the first tokens of its answer. Nothing stands before the
    prompt's first token, so it has null.

    Args:
        text: the prompt as it is shown.
        scored: its tokens from the second on.
    """
    written = [texts[token] for token in prompt]
    places: list[int] = []
    begun = False
    for token, told in zip(prompt, written, strict=True):
        length = None
        if not begun and not text.startswith(told):
            # What stands before the text: a mark of its beginning, or the space that some put before a word.
            if token in texts.special:
                length = 0
            elif told.startswith(" "):
                length = len(told) - 1
        begun = begun or length != 0
        places.append(offsets.take(token, length))
    more = completion_logprobs(tokens, texts, offsets)
    before: dict[str, list[object]] = {
        "tokens": [*written],
        "token_logprobs": [None, *(_finite(token.logprob) for token in scored)],
        "top_logprobs": [None, *(_top(token, texts) for token in scored)],
        "text_offset": [*places],
    }
    return {name: [*values, *_listed(more[name])] for name, values in before.items()}


def _listed(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
