"""Answers as bytes."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
from hypothesis import given

from chairlift.server.payload import dump

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text("abc", max_size=3), values, max_size=4))
def test_what_is_dumped_is_read_back(payload: dict[str, object]) -> None:
    assert json.loads(dump(payload)) == payload


def test_it_is_compact_and_a_line() -> None:
    assert dump({"a": [1, "é\n"], "b": math.nan}) == '{"a":[1,"é\\n"],"b":null}'.encode()
    assert dump({"a": 2**70}) == b'{"a":1180591620717411303424}'
