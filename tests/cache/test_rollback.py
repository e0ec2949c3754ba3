"""Rejected drafts: the row goes back, bit for bit, and only that row."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest

from chairlift.cache.mamba import BatchMambaCache
from chairlift.cache.rollback import RowRollback
from chairlift.cache.state_spec import MambaStateSpec, specs_for
from tests.mlx.families import FAMILIES, build

SPEC = MambaStateSpec(((2,), (1,)), (mx.float32, mx.int32), "mamba1", 4, num_speculative_blocks=2)


def batch(*rows: int) -> BatchMambaCache:
    cache = BatchMambaCache()
    cache[0] = mx.array([[row, -row] for row in rows], dtype=mx.float32)
    cache[1] = mx.array([[row] for row in rows], dtype=mx.int32)
    return cache


def test_a_row_goes_back_alone() -> None:
    cache, kept = batch(1, 2, 3), RowRollback(SPEC)
    kept.snapshot(cache, 1, tokens=10)
    cache.cache = batch(4, 5, 6).cache
    kept.snapshot(cache, 1, tokens=11)
    cache.cache = batch(7, 8, 9).cache
    kept.rollback(cache, 1, tokens=10)
    assert cache[0].tolist() == [[7, -7], [2, -2], [9, -9]] and cache[1].tolist() == [[7], [2], [9]]
    assert kept.tokens == (10,) and kept.nbytes == SPEC.page_size_bytes


def test_there_is_room_for_the_drafts_and_no_more() -> None:
    cache, kept = batch(1), RowRollback(SPEC)
    for tokens in (5, 6, 7):
        kept.snapshot(cache, 0, tokens)
    assert kept.nbytes == SPEC.row_bytes
    with pytest.raises(ValueError, match="2 speculative blocks"):
        kept.snapshot(cache, 0, 8)
    kept.rollback(cache, 0, 7)
    kept.snapshot(cache, 0, 8)
    assert kept.tokens == (7, 8)


def test_without_speculative_blocks_only_the_row_s_own_state() -> None:
    kept = RowRollback(dataclasses.replace(SPEC, num_speculative_blocks=0))
    kept.snapshot(batch(1), 0, 1)
    with pytest.raises(ValueError, match="0 speculative blocks"):
        kept.snapshot(batch(1), 0, 2)


def test_what_it_cannot_do() -> None:
    cache, kept = batch(1, 2), RowRollback(SPEC)
    kept.snapshot(cache, 1, 5)
    with pytest.raises(ValueError, match="5 is not after it"):
        kept.snapshot(cache, 1, 5)
    with pytest.raises(ValueError, match=r"after 4 tokens, only after \(5,\)"):
        kept.rollback(cache, 1, 4)
    with pytest.raises(IndexError, match="row 2 of a batch of 2"):
        kept.rollback(cache, 2, 5)
    with pytest.raises(ValueError, match="no written recurrent states"):
        kept.snapshot(BatchMambaCache([0]), 0, 6)


def test_a_model_goes_on_from_where_its_draft_was_rejected() -> None:
    """mamba2, rows in a batch: row 0 drafts three tokens, two are wrong, and the right ones follow."""
    model = build(FAMILIES["mamba2"])
    specs = [dataclasses.replace(spec, num_speculative_blocks=3) for spec in specs_for(model)]
    prompt = mx.array([[3, 1, 4], [1, 5, 9]])

    def run(tokens: list[list[int]]) -> tuple[list[BatchMambaCache], mx.array]:
        caches = [BatchMambaCache.merge([c, c]) for c in model.make_cache()]
        model(prompt, cache=caches)
        for step in tokens:
            logits = model(mx.array(step)[:, None], cache=caches)
        return caches, logits

    caches, _ = run([[2, 6]])
    kept = [RowRollback(spec) for spec in specs]
    for tokens, step in enumerate([[6, 5], [7, 3], [8, 5]], start=4):
        for keeper, cache in zip(kept, caches, strict=True):
            keeper.snapshot(cache, 0, tokens)
        model(mx.array(step)[:, None], cache=caches)
    for keeper, cache in zip(kept, caches, strict=True):
        keeper.rollback(cache, 0, 5)
    logits = model(mx.array([[1], [8]]), cache=caches)
    _, first = run([[2, 6], [6, 5], [1, 8]])
    _, second = run([[2, 6], [6, 5], [7, 3], [8, 5], [1, 8]])
    assert mx.array_equal(logits[0], first[0]) and mx.array_equal(logits[1], second[1])
