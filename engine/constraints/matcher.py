"""Following rows' tokens, and which may come next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from time import perf_counter, thread_time

import numpy as np
from llguidance import LLExecutor, LLMatcher

_OWN_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
BROKEN = "The answer's constraint could not be followed: {}."
TOO_SLOW = "it takes too much time; an ambiguous grammar takes more with every token"
ALLOWANCE = 0.01
"""Seconds of a processor that a token may cost. Ordinary ones take some 0.0003, those of an unwieldy pattern
0.005; those of an ambiguous grammar (`e: e e | "a"`) ever more, within llguidance's own limits."""
PATIENCE = 0.5
"""Seconds that a row's tokens may cost beyond that, all together."""
SLOW = 0.025
"""Seconds of filling many masks after which the next ones are filled one by one, to see whose they are."""


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
        self._overdrawn = 0.0

    def advance(self, token: int) -> None:
        """The row has drawn the token. Tokens after the end of the answer (drawn ahead) have no effect."""
        if self.fault is not None or self.inner.is_stopped():
            return
        self._overdrawn = max(0.0, self._overdrawn - ALLOWANCE)
        began = thread_time()
        if not self.inner.consume_token(token):
            self.note_fault()
        self._charge(thread_time() - began)

    def fill(self, bits: np.ndarray) -> None:
        """Its mask, into int32 `[at least words]`."""
        began = thread_time()
        self.inner.unsafe_compute_mask_ptr(bits.ctypes.data, self.words * 4)
        self._charge(thread_time() - began)

    def _charge(self, seconds: float) -> None:
        """Set `fault` once it costs too much: it shares the step with all other rows."""
        self._overdrawn += seconds
        if self.fault is None and self._overdrawn > PATIENCE:
            self.fault = BROKEN.format(TOO_SLOW)
            self.reason = TOO_SLOW

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
        self._slow = False

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
        if len(following) == 1 or self._slow:
            self._slow = False
            for matcher, row in following:
                matcher.fill(bits[row])
        elif following:
            self._fill_together(following, bits)
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

    def _fill_together(self, following: Sequence[tuple[Matcher, int]], bits: np.ndarray) -> None:
        if self._executor is None:
            self._executor = LLExecutor()
        began = perf_counter()
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.inner, row) for matcher, row in following],
            bits.ctypes.data,
            bits.strides[0],
            len(bits),
        )
        self._slow = perf_counter() - began > SLOW


def first_line(text: str) -> str:
    """What one of llguidance's explanations comes to, without its period and its place in our own grammar."""
    text = _OWN_PLACE.sub("", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["unknown reason"])[0][:300].rstrip(".")
