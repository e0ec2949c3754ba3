"""Caches made from pages: what the pages were made from, whatever is put in at once, with the room asked."""

from __future__ import annotations

import io
import re

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from chairlift.cache import pages
from chairlift.cache.pages import PageFormat
from tests.cache.test_pack_many import TOKENS, filled


@given(
    each=st.integers(1, 9),
    tokens=st.integers(1, TOKENS),
    spare=st.integers(0, 8),
    room=st.sampled_from([0, 1, TOKENS, TOKENS + 7]),
    at_once=st.integers(1, 4),
    odd=st.booleans(),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_they_hold_what_was_kept_and_take_more(
    each: int, tokens: int, spare: int, room: int, at_once: int, odd: bool, dtype: mx.Dtype
) -> None:
    caches = filled(3, 2, 5, dtype, last_width=3 if odd else 5)
    format = PageFormat([KVCache() for _ in caches])
    format.measure(caches)
    ends = min(TOKENS, tokens + min(spare, each - 1))
    parts = [(start, min(start + each, ends)) for start in range(0, ends, each) if start < tokens]
    kept = [(format.pack(format.planes(caches, start, stop)), stop - start) for start, stop in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "GROUP_BYTES", at_once * kept[0][0].nbytes)
        got = format.restore(kept, tokens, None, room=room)
    more = mx.ones((1, 2, 1, 5), dtype=dtype), mx.ones((1, 2, 1, 3 if odd else 5), dtype=dtype)
    for index, (cache, source) in enumerate(zip(got, caches, strict=True)):
        assert cache.offset == tokens
        assert cache.keys.shape[2] == cache.values.shape[2] == max(tokens, room)
        token = more[1] if index == len(caches) - 1 else more[0]
        keys, values = cache.update_and_fetch(token, token)
        for array, want in ((keys, source.keys), (values, source.values)):
            assert array[:, :, :tokens].tolist() == want[:, :, :tokens].tolist()
            assert array[:, :, tokens:].tolist() == token.tolist()
        if room > tokens:
            assert cache.keys.shape[2] == room, "nothing was copied to grow"


class Graphs:
    """What is computed, as graphs of operations: made in place of every evaluation that is not waited for."""

    def __init__(self) -> None:
        self.made: list[dict[str, tuple[str, list[str]]]] = []

    def __call__(self, *arrays: mx.array) -> None:
        text = io.StringIO()
        mx.export_to_dot(text, *arrays)
        names = dict(re.findall(r'\{ (\d+) \[label ="([^"]*)"', text.getvalue()))
        edges = re.findall(r'"?(\w+)"? -> "?(\w+)"?', text.getvalue())
        maker = {array: name for name, array in edges if name in names}
        inputs: dict[str, list[str]] = {name: [] for name in names}
        for array, name in edges:
            if name in names:
                inputs[name].append(names[maker[array]] if array in maker else "data")
        self.made.append({name: (names[name], inputs[name]) for name in names})
        mx.eval(*arrays)

    def inputs(self, kind: str) -> list[list[str]]:
        """Who made what the operations of this kind take."""
        found = (made.values() for made in self.made)
        return [inputs for each in found for name, inputs in each if name.split()[0] == kind]


@pytest.mark.parametrize(("room", "last", "groups"), [(0, 8, 3), (48, 8, 3), (48, 3, 2)])
def test_whole_pages_take_one_copy_a_plane(
    room: int, last: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other: views of what is stacked, written where they belong. A view as numbers of a part that is not
    contiguous is a copy, and on CUDA one through unified memory."""
    caches = filled(3, 2, 5, mx.bfloat16, last_width=3)
    format = PageFormat([KVCache() for _ in caches])
    format.measure(caches)
    parts = [(start, start + 8) for start in range(0, 32, 8)] + [(32, 32 + last)]
    kept = [(format.pack(format.planes(caches, start, stop)), stop - start) for start, stop in parts]
    mx.eval([page for page, _ in kept])
    monkeypatch.setattr(pages, "GROUP_BYTES", 2 * kept[0][0].nbytes)
    monkeypatch.setattr(mx, "async_eval", graphs := Graphs())
    format.restore(kept, 32 + last, None, room=room)
    whole = [inputs for inputs in graphs.inputs("SliceUpdate") if inputs[1] == "Transpose"]
    assert len(whole) == 6 * groups, "six planes, two pages at once"
    stacked = {inputs[0] for inputs in graphs.inputs("View")}
    assert stacked == {"Concatenate", "ExpandDims"}, "all bytes of a group, or of one page"
