"""Which waiting texts are computed next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.embedding.queue import EmbeddingQueue, Entry
from chairlift.engine.errors import QueueFull

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def queue_of(*requests: list[int]) -> EmbeddingQueue[int]:
    queue: EmbeddingQueue[int] = EmbeddingQueue(100, 10**6)
    for name, lengths in enumerate(requests):
        queue.add(name, lengths)
    return queue


def padded(batch: list[Entry[int]]) -> int:
    return len(batch) * max(entry.length for entry in batch)


@given(st.lists(LENGTHS, max_size=8), st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_every_text_comes_once_within_the_bounds(
    requests: list[list[int]], max_tokens: int, max_texts: int, padding: bool
) -> None:
    queue = queue_of(*requests)
    seen: list[tuple[int, int]] = []
    while batch := queue.take(max_tokens, max_texts, padding=padding):
        assert len(batch) == 1 or padded(batch) <= max_tokens
        assert len(batch) <= max_texts
        assert padding or len({entry.length for entry in batch}) == 1
        assert all(entry.length == requests[entry.request][entry.index] for entry in batch)
        seen += [(entry.request, entry.index) for entry in batch]
    assert sorted(seen) == [(name, at) for name, texts in enumerate(requests) for at in range(len(texts))]
    assert queue.tokens == 0 and len(queue) == 0


@given(st.lists(LENGTHS, min_size=1, max_size=8), st.integers(1, 100), st.integers(1, 8))
def test_nobody_waits_for_more_than_the_others_turns(
    requests: list[list[int]], max_tokens: int, max_texts: int
) -> None:
    """Of n requests each has a text in n batches that follow one another."""
    queue = queue_of(*requests)
    waited = dict.fromkeys(range(len(requests)), 0)
    left = [len(texts) for texts in requests]
    while batch := queue.take(max_tokens, max_texts):
        for entry in batch:
            left[entry.request] -= 1
        inside = {entry.request for entry in batch}
        for name in waited:
            waited[name] = 0 if name in inside or not left[name] else waited[name] + 1
            assert waited[name] < len(requests)


@given(st.lists(LENGTHS, min_size=2, max_size=8), st.integers(0, 3), st.data())
def test_a_dropped_request_comes_no_more(
    requests: list[list[int]], batches: int, data: st.DataObject
) -> None:
    queue = queue_of(*requests)
    for _ in range(batches):
        queue.take(60, 4)
    dropped = data.draw(st.sampled_from(range(len(requests))))
    queue.drop(dropped)
    queue.drop(dropped)
    left = queue.tokens
    while batch := queue.take(60, 4):
        assert dropped not in {entry.request for entry in batch}
        left -= sum(entry.length for entry in batch)
    assert left == 0


def test_batches_are_of_like_lengths() -> None:
    queue = queue_of([3, 40, 4, 39], [5, 41, 6])
    batches = []
    while batch := queue.take(120, 3):
        batches.append([(entry.request, entry.length) for entry in batch])
    # 41 waits for its own turn: a batch is as long as the longest text of the request whose turn it is.
    assert batches == [[(0, 40), (0, 39), (1, 6)], [(1, 41), (1, 5)], [(0, 4), (0, 3)]]


def test_bounds() -> None:
    queue: EmbeddingQueue[str] = EmbeddingQueue(2, 100)
    queue.add("alone it may be too long", [500])
    with pytest.raises(QueueFull):
        queue.add("beside it nothing fits", [1])
    queue.drop("alone it may be too long")
    queue.add("a", [10, 20])
    queue.add("b", [70])
    with pytest.raises(QueueFull) as refusal:
        queue.add("c", [], retry_after=7.5)
    assert refusal.value.retry_after == 7.5
    queue.drop("a")
    with pytest.raises(QueueFull):
        queue.add("c", [31])
    queue.add("c", [30])
    assert (len(queue), queue.tokens) == (2, 100)


def test_empty() -> None:
    queue: EmbeddingQueue[str] = EmbeddingQueue(2, 100)
    assert queue.take(10, 10) == []
    queue.drop("unknown")
