"""The model of costs that the constant floor of cohorts is held against."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.layout import STEP, CohortLayout
from tests.bench.scripts import script

cohorts = script("cohorts")
MILLISECONDS = st.floats(0, 10)


@pytest.mark.parametrize(
    ("launch", "token", "floor"),
    [
        # Eight rows below F, in two cohorts instead of one, are spared 2 F tokens: 2 F = launch / token.
        (0.128, 0.0005, 128),
        (0.200, 0.0005, 256),  # 200, in steps of 64
        (4.0, 0.0005, 1024),
        (0.001, 0.0005, 64),
        (-0.001, 0.0005, 64),  # a clock's noise
        (0.064, 0.0, 1024),
        (0.064, -0.0001, 1024),
    ],
)
def test_a_floor_by_hand(launch: float, token: float, floor: int) -> None:
    assert cohorts.CohortCost(launch, token).floor == floor


@given(MILLISECONDS, MILLISECONDS, MILLISECONDS)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_dearer_launches_never_lower_it_and_dearer_padding_never_raises_it(
    launch: float, token: float, more: float
) -> None:
    floor = cohorts.CohortCost(launch, token).floor
    assert 64 <= floor <= 1024 and floor % STEP == 0
    assert cohorts.CohortCost(launch + more, token).floor >= floor
    assert cohorts.CohortCost(launch, token + more).floor <= floor


@pytest.mark.parametrize(
    ("name", "blocks"), [("ONE", [(8, 128)]), ("TWO", [(4, 64), (4, 192)]), ("LONG", [(8, 512)])]
)
def test_rows_lie_in_as_many_cohorts_as_are_measured(name: str, blocks: list[tuple[int, int]]) -> None:
    layout = CohortLayout(floor=0)
    layout.join(enumerate(getattr(cohorts, name)))
    assert [(len(c.slots), c.capacity) for c in layout.cohorts.values()] == blocks


def test_costs_are_differences_by_layer_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohorts, "attention", lambda *_: None)
    monkeypatch.setattr(cohorts, "best", lambda *_: {"one": 1.0, "two": 1.5, "long": 4.0})
    assert cohorts.cost_of((4, 1, 64), 1) == cohorts.CohortCost(0.5 / 4, 3.0 / (4 * 8 * 384))
