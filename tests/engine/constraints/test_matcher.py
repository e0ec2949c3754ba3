"""Masks of many rows at once."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from chairlift.engine.constraints import Lark, Literal, Regex
from chairlift.engine.constraints import matcher as following
from chairlift.engine.constraints.matcher import MaskFiller, Matcher, first_line
from tests.vocabularies import END, STOP, TOY, toy_compiler, toy_tokens

COMPILER = toy_compiler()
AMBIGUOUS = Lark('start: e\ne: e e | "a" | "b"')
A = TOY.index(b"a")


def tokens(bits: np.ndarray) -> set[int]:
    return {token for token in range(bits.size * 32) if int(bits[token // 32]) >> (token % 32) & 1}


def test_rows_at_once_get_what_each_gets_alone() -> None:
    filler = MaskFiller()
    texts = ["", "a", "ab", "abc", "b", "a"]
    matchers = [COMPILER.compile(Regex("a?b*c"), "x").compiled.matcher() for _ in texts]
    for matcher, text in zip(matchers, texts, strict=True):
        for token in toy_tokens(text):
            matcher.advance(token)
    together = filler.fill(matchers)
    for row, matcher in enumerate(matchers):
        assert (filler.fill([matcher])[0] == together[row]).all()
    assert tokens(together[0]) == {TOY.index(token) for token in (b"a", b"b", b"c", b"ab")}
    assert tokens(together[3]) == {END, STOP}


def test_rows_without_a_constraint_may_draw_all() -> None:
    matcher = COMPILER.compile(Literal("b"), "x").compiled.matcher()
    bits = MaskFiller().fill([None, matcher, None])
    assert (bits[0] == -1).all() and (bits[2] == -1).all()
    assert tokens(bits[1]) == {TOY.index(b"b")}
    with pytest.raises(ValueError):
        MaskFiller().fill([None])


def test_a_matcher_that_breaks_harms_no_other() -> None:
    good, bad = (COMPILER.compile(Literal("ab"), "x").compiled.matcher() for _ in range(2))
    bad.advance(TOY.index(b"b"))
    assert bad.fault is not None and bad.fault.startswith("The answer's constraint could not be followed")
    bits = MaskFiller().fill([bad, good])
    assert (bits[0] == -1).all()
    assert tokens(bits[1]) == {TOY.index(b"ab")}
    bad.advance(TOY.index(b"a"))  # as before
    assert good.fault is None


def test_tokens_drawn_ahead_of_the_end_change_nothing() -> None:
    matcher = COMPILER.compile(Literal("a"), "x").compiled.matcher()
    for token in (TOY.index(b"a"), END, TOY.index(b"b"), STOP):
        matcher.advance(token)
    assert matcher.fault is None and matcher.complete
    assert tokens(MaskFiller().fill([matcher])[0]) == {END, STOP}


def fails_after(matchers: list[Matcher], most: int) -> int:
    """Tokens that all of them draw until the first one has a fault."""
    filler = MaskFiller()
    for drawn in range(most):
        filler.fill(matchers)
        for matcher in matchers:
            matcher.advance(A)
        if matchers[0].fault is not None:
            return drawn + 1
    raise AssertionError("none failed")


@pytest.mark.parametrize("company", [0, 2])
def test_an_ambiguous_grammar_costs_more_and_more_and_fails_alone(
    company: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "PATIENCE", 0.05)
    monkeypatch.setattr(following, "ALLOWANCE", 0.001)
    monkeypatch.setattr(following, "SLOW", 0.005)
    others = [COMPILER.compile(Regex("[a-z]*"), "x").compiled.matcher() for _ in range(company)]
    ambiguous = COMPILER.compile(AMBIGUOUS, "x").compiled.matcher()
    fails_after([ambiguous, *others], 400)
    assert ambiguous.fault == following.BROKEN.format(following.TOO_SLOW)
    assert [other.fault for other in others] == [None] * company
    bits = MaskFiller().fill([ambiguous, *others])
    assert (bits[0] == -1).all()
    assert all(A in tokens(row) for row in bits[1:])


def test_what_a_token_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on whenever it is looked at: so much a mask, so much a token."""
    monkeypatch.setattr(following, "ALLOWANCE", 2.0)
    monkeypatch.setattr(following, "PATIENCE", 5.0)
    monkeypatch.setattr(following, "thread_time", count(0, 1.5).__next__)
    matcher = COMPILER.compile(Regex("a*"), "x").compiled.matcher()
    assert fails_after([matcher], 9) == 5  # masks leave it 1.5, 3, 4, 5 and 6 overdrawn
    monkeypatch.setattr(following, "thread_time", count(0, 1.0).__next__)
    matcher = COMPILER.compile(Regex("a*"), "x").compiled.matcher()
    with pytest.raises(AssertionError, match="none failed"):
        fails_after([matcher], 50)


def test_after_slow_masks_the_next_ones_are_filled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []

    def clock() -> float:
        looked.append(0.0)
        return 0.0

    monkeypatch.setattr(following, "thread_time", clock)
    # Three fills of two rows at once, of which the first alone is slow.
    monkeypatch.setattr(following, "perf_counter", iter([0.0, 0.1, 1.0, 1.001]).__next__)
    matchers = [COMPILER.compile(Regex("a*"), "x").compiled.matcher() for _ in range(2)]
    filler, alone = MaskFiller(), []
    for _ in range(3):
        before = len(looked)
        bits = filler.fill(matchers)
        assert all(tokens(row) == {A, END, STOP} for row in bits)
        alone.append((len(looked) - before) // 2)
    assert alone == [0, 2, 0]


def test_explanations_are_one_line() -> None:
    assert first_line("at 2(9): failed to compile JSON schema: No.\n more\n") == "No"
    assert first_line("regex parse error:\n    (a\n    ^\nerror: unclosed group") == "unclosed group"
    assert first_line(" \n") == "unknown reason"
