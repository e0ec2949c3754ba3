"""Pages that are made together are those that are made one by one."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from chairlift.cache import pages
from chairlift.cache.pages import PageFormat

TOKENS = 40


def filled(layers: int, heads: int, width: int, dtype: mx.Dtype, last_width: int) -> list[KVCache]:
    caches = [KVCache() for _ in range(layers)]
    for index, cache in enumerate(caches):
        wide = last_width if index == layers - 1 else width
        draw = mx.random.normal((2, 1, heads, TOKENS, wide), key=mx.random.key(index)).astype(dtype)
        cache.update_and_fetch(draw[0], draw[1])
    return caches


@given(
    each=st.integers(1, 9),
    count=st.integers(1, 4),
    rest=st.lists(st.integers(1, 5), max_size=2),
    first=st.integers(0, 3),
    gap=st.booleans(),
    odd=st.booleans(),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_they_are_equal_byte_for_byte(
    each: int, count: int, rest: list[int], first: int, gap: bool, odd: bool, dtype: mx.Dtype
) -> None:
    caches = filled(3, 2, 5, dtype, last_width=3 if odd else 5)
    format = PageFormat([KVCache() for _ in caches])
    format.measure(caches)
    parts, at = [], first
    for index, tokens in enumerate([each] * count + rest):
        if at + tokens + 1 > TOKENS:
            break
        at += gap and index == 2
        parts.append((at, at + tokens))
        at += tokens
    planes = format.planes(caches, 0, TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.gpu)  # what a GPU does, wherever this runs
        got = format.pack_many(planes, parts)
    want = [format.pack(format.planes(caches, start, stop)) for start, stop in parts]
    assert [page.tolist() for page in got] == [page.tolist() for page in want]
    assert [page.nbytes for page in got] == [format.page_bytes(stop - start) for start, stop in parts]


def test_whole_pages_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = filled(3, 2, 8, mx.float32, 8)
    format = PageFormat([KVCache() for _ in caches])
    format.measure(caches)
    alone = []
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(pages, "_bytes", lambda plane: alone.append(plane.shape) or mx.zeros(16, mx.uint8))
    format.pack_many(format.planes(caches, 0, TOKENS), [(0, 16), (16, 32), (32, 40)])
    assert alone == [(1, 2, 8, 8)] * 6
