"""One row's dealings with the kept prefixes: what it takes over, what it leaves behind, whom it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.prefix.chain import Chain
from chairlift.engine.prefix.fetch import Catalogue, missing_pages
from chairlift.engine.prefix.images import NamedPrompt
from chairlift.engine.prefix.index import Hit, PrefixIndex
from chairlift.engine.prefix.node import Node
from chairlift.engine.prefix.vocabulary import Page, Restore, Save

LEAST_CHECKPOINT = 128
"""Tokens before the first checkpoint: a shorter prefix is sooner computed again than kept."""


class RowPrefix:
    """
    Args:
        root: the digest of the empty sequence (`chain.root_digest`).
        prompt: the row's.
    """

    def __init__(self, index: PrefixIndex, root: bytes, prompt: NamedPrompt) -> None:
        self._index = index
        self._chain = Chain(root, index.spec.block_tokens, prompt.tokens)
        self._prompt = len(self._chain)
        self._images = prompt
        self._least = prompt.seen_to if index.spec.whole_images else 0
        self._node: Node | None = None  # the last full block that is kept
        self._made: list[Page] = []
        self._found: tuple[int, Hit] | None = None
        self._before_fetch: int | None = None  # tokens that were kept then

    # Before admission

    @property
    def available(self) -> int:
        """Tokens of the row that are kept now. At least one is left to compute."""
        return self._find().tokens

    @property
    def beginning(self) -> bytes | None:
        """The same for all rows that share a block of their prompts; None for one without a block."""
        return self._chain.beginning

    def awaits(self, other: RowPrefix, computed: int) -> bool:
        """Whether `other`, a row in prefill that has launched `computed` tokens, is about to leave more of
        this row's prefix than there is now."""
        if other._index is not self._index:
            return False
        block = self._index.spec.block_tokens
        shared = min(self._chain.shared_blocks(other._chain), (len(self._chain) - 1) // block) * block
        shared = min(shared, self._index.longest)
        if shared < self._least:
            return False
        if self._index.spec.checkpointed:
            shared = other._checkpoint_before(shared)
        return shared > computed and shared > self.available

    def missing(self, catalogue: Catalogue) -> tuple[Page, ...]:
        """What is worth fetching from the disk for the row."""
        pages = missing_pages(self._index, catalogue, self._chain, self.available, len(self._chain) - 1)
        return pages if pages and pages[-1].start + pages[-1].tokens >= self._least else ()

    def fetches(self) -> None:
        """From now on the row waits for what is fetched."""
        self._before_fetch = self.available

    def adopt(self, pages: Sequence[Page]) -> list[Page | None]:
        """What was fetched, to be loaded under new ids; None where it is of no use any more."""
        return self._index.adopt(self._chain, pages)

    # Admission

    def images_within(self, tokens: int) -> int:
        """Images of the prompt that end within its first `tokens` tokens."""
        return self._images.images_within(tokens)

    def known(self, tokens: Sequence[int]) -> None:
        """What the row is to hold: the prompt, and behind a preemption its output."""
        self._chain.extend(tokens[len(self._chain) :])
        self._prompt = len(self._chain)

    def take_over(self) -> Restore | None:
        """What the row begins with. Counts as used."""
        hit = self._find()
        self._index.queried += len(self._chain)
        self._index.hit += hit.tokens
        if self._before_fetch is not None:
            self._index.disk_hit += max(0, hit.tokens - self._before_fetch)
            self._before_fetch = None
        self._node = hit.node
        while self._node is not None and (
            self._node.stop > hit.tokens or self._node.page.tokens < self._index.spec.block_tokens
        ):
            self._node = self._node.parent
        if not hit.tokens:
            return None
        pages, checkpoint = self._index.use(hit)
        return Restore(pages, hit.tokens, checkpoint)

    def _find(self) -> Hit:
        if self._found is None or self._found[0] != self._index.version:
            hit = self._index.find(self._chain, len(self._chain) - 1)
            self._found = self._index.version, hit if hit.tokens >= self._least else Hit()
        return self._found[1]

    # What it leaves

    def span_end(self, start: int, stop: int) -> int:
        """Where a span from `start` that may reach `stop` is to end, so that a checkpoint can be taken."""
        if not self._index.spec.checkpointed:
            return stop
        every = self._index.spec.checkpoint_tokens
        ends = (max(start, self._least) // every * every + every, self._last_checkpoint)
        return min([stop, *(end for end in ends if start < end < stop and end >= self._least_checkpoint)])

    def after_span(self, row: int, stop: int) -> Save | None:
        """To be saved once the row holds `stop` tokens of its prefill."""
        if stop < self._least:
            return None
        self._node, new = self._index.grow(self._chain, self._node, stop)
        checkpoint = None
        if self._node is not None and self._node.stop == stop == self._checkpoint_before(stop):
            checkpoint = self._index.checkpoint(self._node)
        pages = tuple(node.page for node in new if not node.dead)
        return self._save(row, Save(row, pages, checkpoint))

    def at_end(self, row: int, tokens: Sequence[int], held: int) -> Save | None:
        """To be saved of a row that ends.

        Args:
            tokens: what is known of the tokens that it holds.
            held: how many it holds.
        """
        self._chain.extend(tokens[len(self._chain) :])
        stop = len(tokens)
        self._node, new = self._index.grow(self._chain, self._node, stop)
        checkpointed, checkpoint = self._index.spec.checkpointed, None
        wanted = checkpointed and stop == held and stop >= LEAST_CHECKPOINT
        if wanted or not checkpointed:
            tail = self._index.grow_tail(self._chain, self._node, stop)
            new += [tail] if tail is not None else []
        if wanted:
            node = self._index.node_at(self._chain, self._node, stop)
            checkpoint = self._index.checkpoint(node) if node is not None else None
        return self._save(row, Save(row, tuple(node.page for node in new if not node.dead), checkpoint))

    def distrust(self) -> None:
        """The row went wrong: what it left goes too."""
        self._index.distrust(self._made)
        self._made.clear()
        self._node = None

    def _save(self, row: int, save: Save) -> Save | None:
        pages = [*save.pages, save.checkpoint]
        self._made += [page for page in pages if page is not None]
        return save if any(pages) else None

    @property
    def _last_checkpoint(self) -> int:
        """Of the prefill: the last border between blocks with a token behind it."""
        block = self._index.spec.block_tokens
        return (self._prompt - 1) // block * block

    def _checkpoint_before(self, tokens: int) -> int:
        """Where, within the first `tokens` tokens, the row's prefill leaves its last checkpoint, or 0."""
        every = self._index.spec.checkpoint_tokens
        last = self._last_checkpoint if self._last_checkpoint <= tokens else tokens // every * every
        return last if last >= self._least_checkpoint and self._index.spec.checkpointed else 0

    @property
    def _least_checkpoint(self) -> int:
        return max(LEAST_CHECKPOINT, self._least)
