"""Some rows of a batch out of it, and back; a number of each row's own beside it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def taken(batch: mx.array, rows: Sequence[int]) -> mx.array:
    """`[len(rows), ...]`: these rows of `[all, ...]`, in ascending order."""
    if len(rows) == batch.shape[0]:
        return batch
    return batch[mx.array(list(rows), dtype=mx.int32)]


def replaced(batch: mx.array, rows: Sequence[int], part: mx.array) -> mx.array:
    """`batch` with `part` `[len(rows), ...]` in the places of `rows`, which ascend.

    By a gather from both: several times faster on a CPU than a scatter of whole rows.
    """
    count = batch.shape[0]
    if len(rows) == count:
        return part
    order = list(range(count))
    for at, row in enumerate(rows):
        order[row] = count + at
    return mx.concatenate([batch, part])[mx.array(order, dtype=mx.int32)]


def column(values: Sequence[float]) -> mx.array:
    """float32 `[rows, 1]`: a number of each row."""
    return mx.array(list(values), dtype=mx.float32)[:, None]
