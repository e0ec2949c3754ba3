"""Following rows' tokens, and which may come next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

_OWN_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
BROKEN = "The answer's constraint could not be followed: {}."


class Matcher:
    """Follows the tokens of one row. For one thread at a time.

    Args:
        inner: at its start.
        words: 32-bit words of a mask.
    """

    def __init__(self, inner: LLMatcher, words: int) -> None:
        self.inner = inner
        self.words = words
        self.fault: str | None = None
        """Why it follows no more, in one line for the client."""
        self.reason = ""
        """The same in llguidance's words."""

    def advance(self, token: int) -> None:
        """The row has drawn the token. Tokens after the end of the answer (drawn ahead) have no effect."""
        if self.fault is None and not self.inner.is_stopped() and not self.inner.consume_token(token):
            self.note_fault()

    def note_fault(self) -> None:
        """Set `fault` where llguidance gave up: one of its limits was met."""
        if self.inner.is_error():
            self.reason = first_line(self.inner.get_error())
            self.fault = BROKEN.format(self.reason)

    def fresh(self) -> Matcher:
        """Another that stands where this one does."""
        return Matcher(self.inner.deep_copy(), self.words)

    @property
    def accepting(self) -> bool:
        """The answer may end here."""
        return bool(self.inner.is_accepting())

    @property
    def complete(self) -> bool:
        """The answer can only end here."""
        return bool(self.inner.is_stopped())


class MaskFiller:
    """Masks of many rows at once, in parallel and without holding the interpreter up."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, matchers: Sequence[Matcher | None], forced: Mapping[int, int] | None = None) -> np.ndarray:
        """int32 `[rows, words]`: bit t % 32 of word t // 32 is set where the row may draw token t. Rows with
        None may draw all. A matcher that allows nothing gets a `fault`, and its row all bits.

        Args:
            forced: by row, the one token that it may draw.

        Raises:
            ValueError: there is nothing to follow at all.
        """
        forced = forced or {}
        sizes = [matcher.words for matcher in matchers if matcher is not None]
        words = max(sizes + [token // 32 + 1 for token in forced.values()])
        bits = np.full((len(matchers), words), -1, dtype=np.int32)
        following = [(m, row) for row, m in enumerate(matchers) if m is not None and m.fault is None]
        if len(following) == 1:
            matcher, row = following[0]
            matcher.inner.unsafe_compute_mask_ptr(bits[row].ctypes.data, matcher.words * 4)
        elif following:
            if self._executor is None:
                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.inner, row) for matcher, row in following],
                bits.ctypes.data,
                words * 4,
                len(matchers),
            )
        for matcher, row in following:
            matcher.note_fault()
            if matcher.fault is None and not bits[row].any():
                matcher.fault = BROKEN.format("it allows no token here")
            if matcher.fault is not None:
                bits[row] = -1
        for row, token in forced.items():
            bits[row] = 0
            bits.view(np.uint32)[row, token // 32] = 1 << token % 32
        return bits


def first_line(text: str) -> str:
    """What one of llguidance's explanations comes to, without its period and its place in our own grammar."""
    text = _OWN_PLACE.sub("", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["unknown reason"])[0][:300].rstrip(".")
