"""What of a row's prefix is to be fetched from the disk. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from chairlift.engine.prefix.chain import Chain, checkpoint_digest, digest
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.vocabulary import Page

LEAST_BLOCKS = 2
"""What a fetch is to save a row: less is sooner computed than waited for."""


class Catalogue(Protocol):
    """What is on the disk, as far as is known."""

    def __contains__(self, digest: bytes, /) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Files to read for a row, which waits for them."""

    number: int
    pages: tuple[Page, ...]
    """In the order of the sequence, a checkpoint last; without ids."""
    nbytes: int
    """Of their data, about."""


def missing_pages(
    index: PrefixIndex, catalogue: Catalogue, chain: Chain, kept: int, limit: int
) -> tuple[Page, ...]:
    """Pages on the disk that let a row begin at least `LEAST_BLOCKS` blocks later than at the `kept` tokens
    that memory has of its `chain`, and within its first `limit` tokens; none if there are none.

    They begin where memory ends, and fit into it together with what is before them.
    """
    block, spec = index.spec.block_tokens, index.spec
    digests = chain.digests(limit // block)
    here = 0
    while here < len(digests) and index.has(digests[here]):
        here += 1
    there = here
    while there < len(digests) and digests[there] in catalogue:
        there += 1
    if not spec.checkpointed:
        there = min(there, index.limit // max(1, block * spec.bytes_per_token))
        if there * block - kept < LEAST_BLOCKS * block:
            return ()
        return _blocks(chain, digests, here, there)
    for end, tail in _ends(catalogue, chain, digests, there, limit):
        stop = end * block + (tail.tokens if tail is not None else 0)
        if stop - kept < LEAST_BLOCKS * block:
            break
        if stop * spec.bytes_per_token + spec.checkpoint_bytes > index.limit:
            continue
        behind = tail.digest if tail is not None else digests[end - 1]
        checkpoint = Page(0, stop, 0, checkpoint_digest(behind), behind)
        tails = (tail,) if tail is not None and not index.has(tail.digest) else ()
        return (*_blocks(chain, digests, here, end), *tails, checkpoint)
    return ()


def _ends(
    catalogue: Catalogue, chain: Chain, digests: list[bytes], blocks: int, limit: int
) -> Iterator[tuple[int, Page | None]]:
    """Where there is a checkpoint on the disk, the furthest first: (full blocks, a tail behind them)."""
    start = blocks * chain.block
    parent = digests[blocks - 1] if blocks else chain.root
    for stop in range(min(limit, start + chain.block - 1), start, -1):
        name = digest(parent, chain.tokens[start:stop])
        if name in catalogue and checkpoint_digest(name) in catalogue:
            yield blocks, Page(0, start, stop - start, name, parent)
    for end in range(blocks, 0, -1):
        if checkpoint_digest(digests[end - 1]) in catalogue:
            yield end, None


def _blocks(chain: Chain, digests: list[bytes], start: int, stop: int) -> tuple[Page, ...]:
    names = [chain.root, *digests]
    return tuple(
        Page(0, at * chain.block, chain.block, names[at + 1], names[at]) for at in range(start, stop)
    )
