"""One row, as the memory's bounds see it. Pure."""

from __future__ import annotations

from chairlift.engine.memory.states import Holding, StateSizes
from chairlift.engine.request import Request
from chairlift.engine.row import Row

SLICE = 64
"""Tokens that every row is to have room for when another is admitted; twice as many each time that one had to
give its state up."""
MOST_DOUBLINGS = 5


def holding(sizes: StateSizes, row: Row) -> Holding:
    """What a row's state is when it is admitted now."""
    tokens = len(row.request.prompt_token_ids) + row.drawn
    return Holding(tokens, extra_of(sizes, row.request), apart(row.request))


def apart(request: Request) -> bool:
    """Its prompt is not computed with those of others."""
    return request.media is not None or request.sampling.prompt_logprobs is not None


def extra_of(sizes: StateSizes, request: Request) -> int:
    """Bytes of a row beside its caches."""
    extra = sizes.counting_bytes if request.sampling.counts_tokens else 0
    if (media := request.media) is not None:
        extra += sum(media.tokens) * sizes.image_bytes
        extra += sum(int(getattr(array, "nbytes", 0)) for array in media.inputs.values())
    return extra


def name_of(row: Row) -> int:
    """Of a row in a trial: its own, or one that no row has."""
    return row.id if row.id is not None else -1 - row.arrival


def spare_of(row: Row) -> int:
    """Tokens that a row is to have room for when another is admitted."""
    left = row.limit - row.launched
    return min(left, SLICE << min(row.preempted, MOST_DOUBLINGS))
