"""The self-test of the ragged kernel, held against stand-ins: a right one passes, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from chairlift.cache import ragged
from tests.cache.test_views import stored_late

LENGTHS = ((1, 70, 300), (513, 2, 129), (9, 700), (577, 1200))


def right(*blocks_and_rows: Any, **named: Any) -> mx.array:
    queries, keys, values, slots, lengths, *more = blocks_and_rows
    if named["new"] is None:  # they are there: stored again as they are
        places = list(zip(slots.tolist(), lengths.tolist(), strict=True))
        named["new"] = tuple(
            mx.stack([block[slot, :, (length - 1) % block.shape[2]] for slot, length in places])[:, :, None]
            for block in (keys, values)
        )
    return stored_late(queries, keys, values, slots, lengths, *more, **named)


def forgetful(queries: mx.array, keys: mx.array, values: mx.array, *more: Any, **named: Any) -> mx.array:
    """Sees the new tokens and does not store them."""
    return right(queries, mx.contiguous(keys + 0), mx.contiguous(values + 0), *more, **named)


def unwrapped(*blocks_and_rows: Any, **named: Any) -> mx.array:
    """Stores at the end of a ring that has wrapped."""
    queries, keys, values, slots, lengths, *more = blocks_and_rows
    return right(queries, keys, values, slots, mx.minimum(lengths, keys.shape[2]), *more, **named)


def blind(*blocks_and_rows: Any, **named: Any) -> mx.array:
    """Attends to something else."""
    return right(*blocks_and_rows, **named) + 0.1


@pytest.mark.parametrize(
    ("kernel", "passes"), [(right, LENGTHS), (forgetful, ()), (unwrapped, LENGTHS[:2]), (blind, ())]
)
def test_the_self_test_tells_right_from_wrong(
    kernel: Callable[..., mx.array], passes: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "ragged_attention", kernel)
    found = tuple(lengths for lengths in LENGTHS if ragged._agrees(64, 4, mx.float32, lengths))
    assert found == passes
