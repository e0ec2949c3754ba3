"""Every family's recorded answers, fed whole, by the character and cut anyhow."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.output.shapes_of import Shape, reason, said, shapes

SHAPES = shapes()


def cuts(text: str, at: list[int]) -> list[str]:
    borders = [0, *sorted({position for position in at if position < len(text)}), len(text)]
    return [text[start:end] for start, end in zip(borders, borders[1:], strict=False)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shape_is_read_as_written_down(shape: Shape) -> None:
    for pieces in ([shape.text], list(shape.text), cuts(shape.text, list(range(0, len(shape.text), 3)))):
        events, end = shape.read(pieces)
        assert said(events) == list(shape.events)
        assert end.reason is reason(shape)
        for event in shape.events:
            if event[0] == "t":
                assert isinstance(json.loads(event[2]), dict)


@settings(max_examples=300, deadline=None)
@given(shape=st.sampled_from(SHAPES), at=st.lists(st.integers(0, 400), max_size=12))
def test_a_shape_cut_anyhow_is_the_same(shape: Shape, at: list[int]) -> None:
    events, end = shape.read(cuts(shape.text, at))
    assert said(events) == list(shape.events)
    assert end.reason is reason(shape)


def test_there_are_thirty_of_each_family() -> None:
    counts = Counter(shape.family for shape in SHAPES)
    main = {family: number for family, number in counts.items() if not family.startswith("others")}
    assert len(main) >= 10 and min(main.values()) >= 30, counts
    assert len({(shape.family, shape.note) for shape in SHAPES}) == len(SHAPES)
