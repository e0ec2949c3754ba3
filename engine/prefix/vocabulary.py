"""What is said of kept prefixes between those who decide, keep and store them. All plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a sequence's state as the runner keeps it for later rows: keys and values of the tokens
    `[start, start + tokens)`, or with `tokens` 0 a checkpoint, the state of recurrent and sliding-window
    layers behind the first `start` tokens. `id` is never used again for another."""

    id: int
    """0 for one that is not kept in memory."""
    start: int
    tokens: int
    digest: bytes = b""
    """Names what it holds, whoever computed it (`chairlift.engine.prefix.chain`): its name on the disk.
    Empty for what is not worth a file."""
    parent: bytes = b""
    """Digest of what is before it; a checkpoint's is that of the page it stands behind."""


@dataclass(frozen=True, slots=True, eq=False)
class PageData:
    """What a page or checkpoint holds, outside the runner."""

    data: memoryview
    """Bytes."""
    shapes: str = ""
    """Of the arrays of a checkpoint, in words that only the runner reads."""


ReadPage = Callable[[], PageData | None]
"""Gives a page that the runner keeps to whoever calls it, on any thread; None where that fails."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A page or checkpoint that comes from the disk."""

    page: Page
    data: PageData


@dataclass(frozen=True, slots=True)
class Restore:
    """A row begins with `tokens` tokens taken over from pages, which follow one another from position 0; the
    last one may reach further."""

    pages: tuple[Page, ...]
    tokens: int
    checkpoint: Page | None = None
    """Behind exactly `tokens` tokens; None for a model without such layers."""


@dataclass(frozen=True, slots=True)
class Save:
    """Copy of a row's state to keep as pages. A checkpoint's `start` is what the row holds at that time."""

    row: int
    pages: tuple[Page, ...]
    checkpoint: Page | None = None

    def without(self, dropped: Collection[int]) -> Save | None:
        """What is left of it if these are not kept after all."""
        pages = tuple(page for page in self.pages if page.id not in dropped)
        checkpoint = self.checkpoint
        if checkpoint is not None and checkpoint.id in dropped:
            checkpoint = None
        return Save(self.row, pages, checkpoint) if pages or checkpoint is not None else None


@dataclass(frozen=True, slots=True)
class PrefixSpec:
    """What pages and checkpoints of a model are."""

    block_tokens: int
    bytes_per_token: int
    checkpoint_bytes: int = 0
    """0 for a model that resumes behind any token."""
    checkpoint_tokens: int = 2048
    """A long prompt leaves a checkpoint every so many tokens; a multiple of `block_tokens`."""
    image_tokens: tuple[int, ...] = ()
    """That stand for images in prompts; empty where prefixes of prompts with images are not kept."""
    whole_images: bool = False
    """A prompt is computed in one piece up to the end of its last image: nothing can be taken over that ends
    before it, and nothing be left before."""

    @property
    def checkpointed(self) -> bool:
        """It resumes at checkpoints only."""
        return self.checkpoint_bytes > 0


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The prefixes kept for later requests."""

    limit_bytes: int = 0
    """0: none are kept."""
    bytes: int = 0
    entries: int = 0
    """Pages and checkpoints."""
    queried_tokens: int = 0
    """Of all admitted prompts, as is the next."""
    hit_tokens: int = 0
    """Taken over instead of being computed."""
    evicted: int = 0
    """Pages and checkpoints."""
    disk_hit_tokens: int = 0
    """Of `hit_tokens`, those that were fetched from the disk for the row."""
    pinned_bytes: int = 0
    """Of `bytes`, those that never go for room."""
    checkpoints: int = 0
    """Of `entries`."""
    checkpoints_taken: int = 0
    """So far."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The prefixes kept on the disk."""

    limit_bytes: int = 0
    """0: none are kept."""
    bytes: int = 0
    """Of all models in the folder, as last counted."""
    entries: int = 0
    """Pages and checkpoints of this model."""
    reads: int = 0
    """Pages and checkpoints read and found right, as is the next."""
    writes: int = 0
    skipped: int = 0
    """Not written, because the disk could not keep up or did not take them."""
    failures: int = 0
    """Files that could not be written, or were not as they should be."""


class PageSink(Protocol):
    """Takes copies of what the runner keeps. Called on the MLX thread; never waits."""

    def wants(self, page: Page, nbytes: int) -> bool:
        """Whether it would take this page; asked before anything is done for it. What there is no room for is
        left out.

        Args:
            nbytes: of this page, of all that were wanted and have not been offered yet, and of what was
                returned and takes memory still.
        """
        ...

    def offer(self, page: Page, nbytes: int, read: ReadPage) -> None:
        """A page that was wanted, of so many bytes. What `read` needs stays until `returned` names the page's
        id."""
        ...

    def returned(self) -> list[int]:
        """Pages, by id, that are read no more, since last asked. Each that was offered comes back once."""
        ...
