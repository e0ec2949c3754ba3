"""The ways in which the rows of a model family share a step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from chairlift.cache.batch import RowBatch
from chairlift.cache.separate import SeparateRows


class Batching(StrEnum):
    """How a family's rows share a step."""

    FLAT = "flat"
    HYBRID = "hybrid"
    DENSE = "dense"
    ROWS = "rows"
    SOLO = "solo"


FLAT_STEPS = (Batching.FLAT, Batching.ROWS)
"""Decode rows and prefill chunks in one forward over `[tokens, 1]`."""


def make_batch(batching: Batching, template: Sequence[Any]) -> RowBatch | SeparateRows:
    """An empty batch of rows with caches such as `template`.

    Raises:
        ValueError: caches that cannot share a batch this way.
    """
    if batching is Batching.SOLO:
        return RowBatch([])
    if batching is Batching.ROWS:
        return SeparateRows(template)
    return RowBatch(template, dense=batching is Batching.DENSE)
