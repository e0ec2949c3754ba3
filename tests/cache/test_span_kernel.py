"""Attention of all chunks of a step: what the CUDA kernel is told, and the reference that it is held to."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from chairlift.cache import views
from chairlift.cache.attention import CohortKV
from chairlift.cache.span_kernel import (
    FAR,
    MOST,
    QUERIES,
    Chunk,
    chunk_of,
    reference,
    span_kernel_available,
    table_of,
)
from chairlift.cache.views import AttendView, SeamMask, SpanStep

lengths = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=8)


@given(lengths, st.sampled_from([1, 2, 4, 8]), st.integers(0, 31))
def test_every_query_is_in_one_thread_block(spans: list[tuple[int, int]], group: int, padding: int) -> None:
    chunks, start = list[Chunk](), 5
    for tokens, offset in spans:
        chunks.append(chunk_of(start, tokens, offset, offset + tokens, 1024, None, ring=False))
        start += tokens
    table = table_of(chunks, group, padding)
    assert table[:2] == [start - 5 + padding, 5]
    facts, tiles = table[2 : 2 + 7 * MOST], table[2 + 7 * MOST :]
    assert [tuple(facts[7 * i : 7 * i + 7]) for i in range(len(chunks))] == [c.numbers for c in chunks]
    pairs = list(zip(tiles[::2], tiles[1::2], strict=True))
    assert [row for chunk, row in pairs if chunk < 0] == ([padding] if padding else [])
    queries = sorted(
        (chunk, query)
        for chunk, row in pairs
        if chunk >= 0
        for query in range(row, min(row + QUERIES, chunks[chunk].tokens * group))
    )
    assert queries == [(i, query) for i, c in enumerate(chunks) for query in range(c.tokens * group)]


def test_a_token_in_a_ring_sees_all_of_it() -> None:
    assert chunk_of(3, 1, 40, 16, 16, 16, ring=True) == Chunk(3, 1, 16, 16, FAR, 0, 0)
    assert chunk_of(3, 2, 40, 17, 17, 16, ring=True) == Chunk(3, 2, 17, 17, 40, 25, 16)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[Chunk]]:
    """The kernel is there; the reference stands in for it."""
    launches = list[list[Chunk]]()

    def attend_chunks(
        queries: mx.array,
        chunks: list[Chunk],
        arrays: Any,
        *,
        scale: float,
        sinks: Any,
        padding: int,
        known: Any,
    ) -> mx.array:
        launches.append(chunks)
        parts = [
            reference(queries, chunk, *pair, scale, sinks) for chunk, pair in zip(chunks, arrays, strict=True)
        ]
        return mx.concatenate([*parts, mx.zeros((padding, *parts[0].shape[1:]))])

    monkeypatch.setattr(views, "attend_chunks", attend_chunks)
    monkeypatch.setattr(views, "span_kernel_available", lambda *_: True)
    return launches


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("sink", [False, True])
def test_a_view_says_the_same_by_it(
    launches: list[list[Chunk]], window: int | None, sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(5, 0), (1, 12), (3, 7), (1, 0), (20, 30)]

    def attended(*, at_once: bool) -> np.ndarray:
        if not at_once:
            monkeypatch.setattr(views, "span_kernel_available", lambda *_: False)
        spans, start = [], 0
        for index, (tokens, offset) in enumerate(shapes):
            cache = KVCache() if window is None else RotatingKVCache(max_size=window)
            for at in range(0, offset, 5):
                old = mx.random.normal((2, 1, 2, min(5, offset - at), 4), key=mx.random.key(100 * index + at))
                cache.update_and_fetch(old[0], old[1])
            spans.append((SpanStep(start, start + tokens, offset), cache))
            start += tokens
        view = AttendView(CohortKV(window), None, mx.arange(start + 2), spans, padding=2)
        draw = [
            mx.random.normal((start + 2, heads, 1, 4), key=mx.random.key(heads + n))
            for n, heads in enumerate((4, 2, 2))
        ]
        view.update_and_fetch(draw[1], draw[2])
        sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if sink else None
        return np.asarray(view.attend(draw[0], scale=0.5, mask=SeamMask(window), sinks=sinks))

    got = attended(at_once=True)
    want = attended(at_once=False)
    assert len(launches) == 1 and len(launches[0]) == len(shapes)
    assert got.shape == want.shape and np.allclose(got, want, atol=1e-5)


def test_without_a_cuda_device_there_is_none() -> None:
    if not mx.cuda.is_available():
        assert not span_kernel_available(128, 32, 8, mx.bfloat16)
