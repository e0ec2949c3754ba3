"""Masks of many rows at once."""

from __future__ import annotations

import numpy as np
import pytest

from chairlift.engine.constraints import Literal, Regex
from chairlift.engine.constraints.matcher import MaskFiller, first_line
from tests.vocabularies import END, STOP, TOY, toy_compiler, toy_tokens

COMPILER = toy_compiler()


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


def test_explanations_are_one_line() -> None:
    assert first_line("at 2(9): failed to compile JSON schema: No.\n more\n") == "No"
    assert first_line("regex parse error:\n    (a\n    ^\nerror: unclosed group") == "unclosed group"
    assert first_line(" \n") == "unknown reason"
