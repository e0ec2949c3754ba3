"""Counting a row's thinking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.thinking import OPENS_WITHIN, ThinkingBudget, ThinkingCount

START, END = 1, 2


def drawing(budget: ThinkingBudget, wishes: list[int]) -> list[int]:
    """What a row draws that would rather draw `wishes`."""
    count, drawn = ThinkingCount(budget), []
    for wish in wishes:
        token = wish if count.forced is None else count.forced
        drawn.append(token)
        count.advance(token)
    return drawn


def test_the_thinking_is_ended_at_the_bound() -> None:
    assert drawing(ThinkingBudget(3, END), [5] * 6) == [5, 5, 5, END, 5, 5]
    assert drawing(ThinkingBudget(3, END, START), [START, 5, 5, 5, 5, 6]) == [START, 5, 5, 5, END, 6]
    assert drawing(ThinkingBudget(0, END), [5, 5]) == [END, 5]


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    wishes = [5, 5, END, 5, 5, 5]
    assert drawing(ThinkingBudget(3, END), wishes) == wishes
    assert drawing(ThinkingBudget(2, END), wishes) == wishes


def test_without_thinking_nothing_is_ended() -> None:
    wishes = [5] * OPENS_WITHIN + [START] + [5] * 9
    assert drawing(ThinkingBudget(0, END, START), wishes) == wishes


tokens = st.sampled_from([START, END, 5, 6])
budgets = st.builds(ThinkingBudget, st.integers(0, 6), st.just(END), st.sampled_from([None, START]))


@given(budgets, st.lists(tokens, max_size=20), st.integers(0, 2))
def test_who_need_not_wait_is_not_ended(budget: ThinkingBudget, wishes: list[int], ahead: int) -> None:
    """`ahead` tokens are drawn and not seen yet when the next draw is launched."""
    drawn = drawing(budget, wishes)
    for at in range(len(drawn)):
        seen = ThinkingCount(budget)
        for token in drawn[: max(at - ahead, 0)]:
            seen.advance(token)
        whole = ThinkingCount(budget)
        for token in drawn[:at]:
            whole.advance(token)
        if not seen.waits(at):
            assert whole.forced is None


@given(budgets, st.lists(tokens, max_size=20))
def test_no_more_is_thought_than_allowed(budget: ThinkingBudget, wishes: list[int]) -> None:
    drawn = drawing(budget, wishes)
    if budget.start is not None:
        opening = drawn[:OPENS_WITHIN]
        if START not in opening:
            assert drawn == wishes
            return
        drawn = drawn[opening.index(START) + 1 :]
    thought = drawn[: drawn.index(END)] if END in drawn else drawn
    assert len(thought) <= budget.most
