"""Log probabilities as OpenAI writes them, in the chat form and in the older one of completions."""

from __future__ import annotations

from collections.abc import Sequence

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


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # a NaN compares as false


def _entry(text: str, logprob: float) -> dict[str, object]:
    # A part of a character decodes to U+FFFD, and its bytes cannot be told from that.
    whole = "\ufffd" not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def chat_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, object]:
    content = [
        {
            **_entry(texts[token.token_id], token.logprob),
            "top_logprobs": [_entry(texts[token_id], logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprob], texts: TokenTexts, offset: int
) -> tuple[dict[str, object], int]:
    """The older form, and the offset at which the next token's text begins.

    `offset` counts characters of the choice's text. Tokens with equal text share an entry of `top_logprobs`,
    whose keys are texts: the more probable one stands.
    """
    names: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    for token in tokens:
        text = texts[token.token_id]
        names.append(text)
        offsets.append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            top.setdefault(texts[token_id], _finite(logprob))
        tops.append(top)
    value: dict[str, object] = {
        "tokens": names,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return value, offset
