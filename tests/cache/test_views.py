"""Attention over cohorts and spans against a float64 reference, row by row."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from chairlift.cache.attention import Block
from chairlift.cache.batch import RowBatch
from chairlift.cache.views import AttendView, DenseView, SeamMask, SpanStep, span_mask

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
SCALE = 0.35
ERROR = 1e-5

Cache = KVCache | RotatingKVCache


@dataclass
class History:
    """All that a row has seen, in float64, and its own cache until it is in the batch."""

    cache: Cache
    keys: np.ndarray = field(default_factory=lambda: np.zeros((KV_HEADS, 0, DIM)))
    values: np.ndarray = field(default_factory=lambda: np.zeros((KV_HEADS, 0, VALUE_DIM)))

    @property
    def length(self) -> int:
        return int(self.keys.shape[1])

    def remember(self, keys: np.ndarray, values: np.ndarray) -> None:
        """`[KV_HEADS, tokens, dim]`."""
        self.keys = np.concatenate([self.keys, keys], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)

    def attention(
        self, query: np.ndarray, position: int, window: int | None, sinks: np.ndarray | None
    ) -> np.ndarray:
        """`[HEADS, VALUE_DIM]` for the query `[HEADS, DIM]` of one position."""
        first = 0 if window is None else max(0, position + 1 - window)
        out = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = self.keys[group, first : position + 1] @ query[head] * SCALE
            total = np.exp(scores).sum() + (0 if sinks is None else np.exp(sinks[head]))
            out.append(np.exp(scores) @ self.values[group, first : position + 1] / total)
        return np.stack(out)


@dataclass(frozen=True)
class Ride:
    """A batch of rows that step, some of which leave, and chunks of rows that prefill beside them."""

    rows: tuple[int, ...]
    leave: frozenset[int]
    steps: int
    spans: tuple[tuple[int, int], ...]
    """(tokens held, tokens of the chunk)."""
    sinks: bool


LENGTHS = st.integers(0, 30) | st.sampled_from((255, 257, 300, 520))


@st.composite
def rides(draw: st.DrawFn) -> Ride:
    rows = tuple(draw(st.lists(LENGTHS, max_size=7)))
    leave = draw(st.frozensets(st.integers(0, 6), max_size=3))
    spans = st.tuples(st.integers(0, 30), st.integers(1, 12))
    chunks = tuple(draw(st.lists(spans, min_size=0 if set(range(len(rows))) - leave else 1, max_size=3)))
    return Ride(rows, leave, draw(st.integers(1, 3)), chunks, draw(st.booleans()))


def random(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.normal(size=shape).astype(np.float32).astype(np.float64)


def array(numbers: np.ndarray) -> mx.array:
    return mx.array(numbers.astype(np.float32))


def seen(make: Callable[[], Cache], draw: np.random.Generator, length: int) -> History:
    """A row that was prefilled with `length` tokens."""
    row = History(make())
    if length:
        keys, values = random(draw, KV_HEADS, length, DIM), random(draw, KV_HEADS, length, VALUE_DIM)
        row.cache.update_and_fetch(array(keys)[None], array(values)[None])
        row.remember(keys, values)
    return row


def check_ride(ride: Ride, make: Callable[[], Cache], window: int | None, effective: int | None) -> None:
    """Take a ride and hold every output against the reference.

    Args:
        window: what the model asks of `make_mask`.
        effective: tokens that a query may see, its own included.
    """
    draw = np.random.default_rng(len(ride.rows) + 10 * ride.steps)
    sinks = random(draw, HEADS) if ride.sinks else None
    rows = {row: seen(make, draw, length) for row, length in enumerate(ride.rows)}
    spans = [seen(make, draw, length) for length, _ in ride.spans]
    batch = RowBatch([make()])
    batch.change(join={row: ([history.cache], history.length) for row, history in rows.items()})
    batch.change(leave=ride.leave)
    for _ in range(ride.steps):
        step = batch.begin() if batch.order else None
        start, placed = len(batch.order), []
        for history, (_, tokens) in zip(spans, ride.spans, strict=True):
            placed.append((SpanStep(start, start + tokens, history.length), history))
            start += tokens
        taking = [(rows[row], 1) for row in batch.order]
        taking += [(history, at.stop - at.start) for at, history in placed]
        positions = [row.length + token for row, tokens in taking for token in range(tokens)]
        offset = mx.array(positions, dtype=mx.int32)
        (view,) = batch.caches(step, offset, [(at, [history.cache]) for at, history in placed])
        queries, keys = random(draw, start, HEADS, 1, DIM), random(draw, start, KV_HEADS, 1, DIM)
        values = random(draw, start, KV_HEADS, 1, VALUE_DIM)
        assert view.offset is offset
        seam_keys, seam_values = view.update_and_fetch(array(keys), array(values))
        assert seam_keys is seam_values is view
        out = view.attend(
            array(queries),
            scale=SCALE,
            mask=view.make_mask(1, window_size=window),
            sinks=None if sinks is None else array(sinks),
        )
        if step is not None:
            batch.end()
        assert out.shape == (start, HEADS, 1, VALUE_DIM)
        got, at = np.array(out)[:, :, 0], 0
        for history, tokens in taking:
            part = slice(at, at + tokens)
            history.remember(keys[part, :, 0].swapaxes(0, 1), values[part, :, 0].swapaxes(0, 1))
            for token in range(at, at + tokens):
                want = history.attention(queries[token, :, 0], positions[token], effective, sinks)
                np.testing.assert_allclose(got[token], want, rtol=0, atol=ERROR)
            at += tokens


FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@FEW
@given(rides())
def test_full_attention(ride: Ride) -> None:
    check_ride(ride, KVCache, None, None)


@FEW
@given(rides(), st.integers(1, 40))
def test_a_window_over_all_tokens(ride: Ride, window: int) -> None:
    check_ride(ride, KVCache, window, window)


@FEW
@given(rides(), st.sampled_from((1, 7, 16, 280)), st.booleans())
def test_rings(ride: Ride, ring: int, named: bool) -> None:
    check_ride(ride, lambda: RotatingKVCache(ring), ring if named else None, ring)


@FEW
@given(rides(), st.sampled_from((7, 16, 280)), st.integers(1, 6))
def test_a_window_smaller_than_its_ring(ride: Ride, ring: int, window: int) -> None:
    chunks = tuple((held, max(2, tokens)) for held, tokens in ride.spans)
    check_ride(
        Ride(ride.rows, ride.leave, 1, chunks, ride.sinks), lambda: RotatingKVCache(ring), window, window
    )


def stored_late(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    slots: mx.array,
    lengths: mx.array,
    longest: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    new: tuple[mx.array, mx.array] | None = None,
    constants: object = None,
) -> mx.array:
    """Stands for the kernel on CUDA: tokens are written into the blocks as they lie, then read."""
    mx.eval(keys, values)
    outs = []
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):  # type: ignore[arg-type]
        at, held = (length - 1) % keys.shape[2], min(length, keys.shape[2])
        assert new is not None and longest >= length
        for block, tokens in zip((keys, values), new, strict=True):
            lies = np.frombuffer(memoryview(block), dtype=np.float32).reshape(block.shape)  # type: ignore[arg-type]
            lies[slot, :, at] = np.array(tokens)[row, :, 0]
        first = max(0, held - window) if window else 0
        shown = (block[slot : slot + 1, :, first:held] for block in (keys, values))
        outs.append(
            mx.fast.scaled_dot_product_attention(queries[row : row + 1], *shown, scale=scale, sinks=sinks)
        )
        mx.eval(outs)
    return mx.concatenate(outs)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode attention stores new tokens itself, where heads are alike. Counts its calls."""
    calls: list[int] = []

    def ragged(*given: Any, **named: Any) -> mx.array:
        calls.append(1)
        return stored_late(*given, **named)

    monkeypatch.setattr("chairlift.cache.attention.on_cuda", lambda: True)
    monkeypatch.setattr("chairlift.cache.attention.ragged_available", lambda *heads: True)
    monkeypatch.setattr("chairlift.cache.attention.ragged_attention", ragged)
    return calls


@pytest.mark.parametrize("ring", [None, 7, 280])
@pytest.mark.parametrize("alike", [True, False])
def test_new_tokens_are_stored_by_attention_or_before_it(
    ring: int | None, alike: bool, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if alike:
        monkeypatch.setattr("tests.cache.test_views.VALUE_DIM", DIM)
    for leave in (frozenset[int](), frozenset({1})):
        ride = Ride((3, 0, 12, 300, 257), leave, 3, ((5, 4),), True)
        check_ride(ride, KVCache if ring is None else lambda: RotatingKVCache(ring), None, ring)
    assert bool(late) is alike


def one_row() -> tuple[AttendView, Block]:
    """A step of a row that holds five tokens, and the block that it lies in."""
    row = seen(KVCache, np.random.default_rng(1), 5)
    batch = RowBatch([KVCache()])
    batch.change(join={0: ([row.cache], 5)})
    step = batch.begin()
    (view,) = batch.caches(step, mx.array([5], dtype=mx.int32))
    return view, view.store.blocks[step.cohorts[0].key]


def test_a_block_that_is_a_view_is_put_in_order_before_attention_writes_into_it(
    late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cache.test_views.VALUE_DIM", DIM)
    view, block = one_row()
    large = [mx.pad(plane, [(0, 0), (0, 0), (0, 64), (0, 0)]) for plane in block.planes]
    block.planes = [plane[:, :, : block.capacity] for plane in large]
    mx.eval(large, block.planes)
    new = mx.full((1, KV_HEADS, 1, DIM), 7.0), mx.full((1, KV_HEADS, 1, DIM), 8.0)
    view.update_and_fetch(*new)
    mx.eval(view.attend(mx.ones((1, HEADS, 1, DIM)), scale=SCALE, mask=view.make_mask(1)))
    for plane, token, old in zip(block.planes, new, large, strict=True):
        assert plane.shape[2] == block.capacity
        np.testing.assert_array_equal(plane[:, :, 5:6], token)
        np.testing.assert_array_equal(plane[:, :, :5], old[:, :, :5])
        assert not old[:, :, 5:].any()


def test_who_reads_a_block_comes_after_what_attention_stored(
    late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cache.test_views.VALUE_DIM", DIM)
    view, block = one_row()
    view.update_and_fetch(mx.ones((1, KV_HEADS, 1, DIM)), mx.ones((1, KV_HEADS, 1, DIM)))
    before = block.planes
    mx.eval(before)
    where = [np.frombuffer(memoryview(plane)).ctypes.data for plane in before]
    out = view.attend(mx.ones((1, HEADS, 1, DIM)), scale=SCALE, mask=view.make_mask(1))
    after = block.planes
    graph = io.StringIO()
    mx.export_to_dot(graph, after[0], after[1], out)
    assert "Depends" in graph.getvalue()
    mx.eval(after)
    assert [np.frombuffer(memoryview(plane)).ctypes.data for plane in after] == where


@pytest.mark.parametrize("held", [5, 7, 9, 14])
def test_what_is_taken_out_of_a_ring_stays_when_attention_stores_the_next_token(
    held: int, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cache.test_views.VALUE_DIM", DIM)
    row = seen(lambda: RotatingKVCache(7), np.random.default_rng(2), held)
    batch = RowBatch([RotatingKVCache(7)])
    batch.change(join={0: ([row.cache], held)})
    (taken,) = batch.states(0)
    step = batch.begin()
    (view,) = batch.caches(step, mx.array([held], dtype=mx.int32))
    new = mx.full((1, KV_HEADS, 1, DIM), 9.0)
    view.update_and_fetch(new, new)
    mx.eval(view.attend(mx.ones((1, HEADS, 1, DIM)), scale=SCALE, mask=view.make_mask(1)))
    assert late
    np.testing.assert_array_equal(np.array(taken.keys)[0], row.keys[:, -7:])
    np.testing.assert_array_equal(np.array(taken.values)[0], row.values[:, -7:])


def dense_step(rows: dict[int, History], window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(fused attention over the dense view's arrays, the reference), `[rows, HEADS, VALUE_DIM]` each."""
    draw = np.random.default_rng(7)
    template = next(iter(rows.values())).cache
    fresh = RotatingKVCache(template.max_size) if isinstance(template, RotatingKVCache) else KVCache()
    batch = RowBatch([fresh], dense=True)
    batch.change(join={row: ([history.cache], history.length) for row, history in rows.items()})
    batch.change(leave=[1])
    step = batch.begin()
    (view,) = batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
    assert isinstance(view, DenseView)
    count = len(batch.order)
    queries, keys = random(draw, count, HEADS, 1, DIM), random(draw, count, KV_HEADS, 1, DIM)
    values = random(draw, count, KV_HEADS, 1, VALUE_DIM)
    all_keys, all_values = view.update_and_fetch(array(keys), array(values))
    out = mx.fast.scaled_dot_product_attention(
        array(queries), all_keys, all_values, scale=SCALE, mask=view.make_mask(1, window_size=window)
    )
    want = []
    for at, row in enumerate(batch.order):
        rows[row].remember(keys[at], values[at])
        limit = getattr(fresh, "max_size", window)
        want.append(rows[row].attention(queries[at, :, 0], rows[row].length - 1, limit, None))
    return np.array(out)[:, :, 0], np.stack(want)


@pytest.mark.parametrize("lengths", [(3, 9, 300, 1), (5, 5, 5), (8, 1, 0)])
@pytest.mark.parametrize(
    ("make", "window"), [(KVCache, None), (KVCache, 4), (lambda: RotatingKVCache(7), None)]
)
def test_dense_rows(lengths: Sequence[int], make: Callable[[], Cache], window: int | None) -> None:
    draw = np.random.default_rng(3)
    got, want = dense_step({row: seen(make, draw, length) for row, length in enumerate(lengths)}, window)
    np.testing.assert_allclose(got, want, rtol=0, atol=ERROR)


def view_of(lengths: Sequence[int], *, dense: bool = False) -> AttendView | DenseView:
    draw = np.random.default_rng(1)
    rows = [seen(KVCache, draw, length) for length in lengths]
    batch = RowBatch([KVCache()], dense=dense)
    batch.change(join={row: ([history.cache], history.length) for row, history in enumerate(rows)})
    step = batch.begin()
    (view,) = batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
    return view  # type: ignore[no-any-return]


@pytest.mark.parametrize("mask", ["causal", mx.ones((2, 1, 1, 6), dtype=mx.bool_), 0])
def test_a_foreign_mask_is_a_type_error(mask: Any) -> None:
    view = view_of([3, 5])
    view.update_and_fetch(mx.zeros((2, KV_HEADS, 1, DIM)), mx.zeros((2, KV_HEADS, 1, VALUE_DIM)))
    assert isinstance(view, AttendView)
    with pytest.raises(TypeError, match="takes the mask of its cache, not"):
        view.attend(mx.zeros((2, HEADS, 1, DIM)), scale=SCALE, mask=mask)


def test_a_mask_that_the_model_works_on_is_a_type_error() -> None:
    mask: Any = view_of([3, 5]).make_mask(1)
    assert mask == SeamMask()
    with pytest.raises(TypeError):
        mask[..., -4:]
    with pytest.raises(TypeError):
        mask + 1


def test_keys_that_the_model_works_on_are_a_type_error() -> None:
    keys: Any = view_of([3, 5])
    with pytest.raises(TypeError):
        mx.zeros((2, HEADS, 1, DIM)) @ keys
    with pytest.raises(TypeError):
        mx.concatenate([keys, keys], axis=1)


def test_a_dense_view_takes_one_token_a_row() -> None:
    with pytest.raises(ValueError, match="one token per row, not 2"):
        view_of([3, 5], dense=True).make_mask(2)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 20), st.integers(0, 60), st.none() | st.integers(1, 30), st.none() | st.integers(1, 70))
def test_span_mask(tokens: int, offset: int, ring: int | None, window: int | None) -> None:
    effective = min((limit for limit in (ring, window) if limit is not None), default=None)
    window = window if ring is None or window is None else min(window, ring)
    if tokens == 1 and ring is not None and window is not None and window < min(ring, offset + 1):
        with pytest.raises(ValueError, match="smaller than the cache"):
            span_mask(1, offset, min(offset + 1, ring), ring, window)
        return
    held = offset + tokens
    if ring is not None:
        held = min(held, ring) if tokens == 1 else min(offset, ring - 1) + tokens
    mask = span_mask(tokens, offset, held, ring, window)
    keys = np.arange(offset + tokens - held, offset + tokens)[None]
    queries = np.arange(offset, offset + tokens)[:, None]
    want = (keys <= queries) & (keys > queries - (effective or 10**9))
    if mask is None:
        assert want.all()
    elif isinstance(mask, str):
        assert mask == "causal"
        np.testing.assert_array_equal(want, np.tril(np.ones((tokens, held), dtype=bool), held - tokens))
    else:
        np.testing.assert_array_equal(np.array(mask), want)


@pytest.mark.parametrize(("offset", "tokens", "ring"), [(0, 20, 8), (5, 6, 8), (30, 9, 8), (3, 4, 8)])
def test_span_masks_are_those_of_upstreams_caches(offset: int, tokens: int, ring: int) -> None:
    cache = RotatingKVCache(ring)
    cache.offset = offset
    theirs = cache.make_mask(tokens)
    ours = span_mask(tokens, offset, min(offset, ring - 1) + tokens, ring, None)
    if isinstance(ours, str):
        assert ours == theirs
    else:
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(np.array(ours), np.array(theirs))
