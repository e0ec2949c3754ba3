"""Small vocabularies for constraints: known bytes for every token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

from llguidance import LLTokenizer, TokenizerWrapper

from chairlift.engine.constraints import Compiler
from chairlift.engine.constraints.matcher import MaskFiller, Matcher
from chairlift.engine.constraints.trial import Trial


class _Vocabulary:
    """What llguidance asks of a tokenizer. Its text is cut greedily, longest token first."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos: int, specials: Collection[int]) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = eos
        self.special_token_ids = sorted(specials)
        self._plain = {token: id for id, token in enumerate(tokens) if id not in specials}

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        found: list[int] = []
        while rest:
            size = next(size for size in range(len(rest), 0, -1) if rest[:size] in self._plain)
            found.append(self._plain[rest[:size]])
            rest = rest[size:]
        return found


def vocabulary(tokens: Sequence[bytes], eos: Sequence[int], specials: Collection[int]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, eos[0], specials)), eos_token=list(eos))


WORDS = (
    b'{"',
    b'":',
    b'": ',
    b'",',
    b'", "',
    b'"}',
    b"}}",
    b"[]",
    b"true",
    b"null",
    b"</",
    b"think",
    b"\xc3",
)
WORDS += (b"\xa9", b"\xa9\xc3", b'a"', b"a\nb", b"12", b", ", b"  ", b"\n\n", b"ab")
END, STOP, MARK = 190, 191, 189
TOY: tuple[bytes, ...] = (
    *(bytes([byte]) for byte in range(128)),
    *WORDS,
    *(b"w%d" % number for number in range(MARK - 128 - len(WORDS))),
    b"<|mark|>",
    b"<|end|>",
    b"<|stop|>",
)
"""192 tokens, as many as the small random models of the tests have: ASCII, pieces of JSON, halves of
characters, three special tokens; two of them end an answer."""


def toy_compiler() -> Compiler:
    return Compiler(lambda: vocabulary(TOY, (END, STOP), {MARK, END, STOP}), trial())


@cache
def trial() -> Trial:
    """One process for all tests."""
    return Trial()


def toy_tokens(text: str) -> list[int]:
    """The text in the longest tokens, as llguidance wants what it foresees; special tokens by their text."""
    found: list[int] = []
    rest = text.encode()
    while rest:
        found.append(max((id for id, token in enumerate(TOY) if rest.startswith(token)), key=_length))
        rest = rest[len(TOY[found[-1]]) :]
    return found


def _length(id: int) -> int:
    return len(TOY[id])


def allowed(matcher: Matcher) -> set[int]:
    """Tokens that may come next."""
    (row,) = MaskFiller().fill([matcher])
    bits = row.view("uint8")
    return {token for token in range(len(bits) * 8) if bits[token // 8] >> (token % 8) & 1}
