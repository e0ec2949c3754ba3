"""Which waiting texts are computed next. Pure Python.

Requests take turns: each batch is led by the longest waiting text of the request whose turn it is, and filled
up with the texts of any request that are next shorter. So a request of one text waits for one batch, not for
the thousand texts of the request before it, and little is padded.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from chairlift.engine.errors import QueueFull

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Entry(Generic[K]):
    """One text of a request."""

    request: K
    index: int
    """Of the text in its request."""
    length: int
    """In tokens."""


class EmbeddingQueue(Generic[K]):
    """Texts that wait, by request. A request leaves when its last text has been taken, or when dropped.

    Args:
        max_requests, max_tokens: bounds of what waits. A request that finds nobody waiting is always taken.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: dict[K, list[Entry[K]]] = {}
        """In the order of their turns; texts by length, the longest first."""
        self.tokens = 0
        """Of all texts that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> KeysView[K]:
        return self._waiting.keys()

    def add(self, request: K, lengths: Sequence[int], retry_after: float = 1.0) -> None:
        """Raises: QueueFull."""
        tokens = sum(lengths)
        if self._waiting and (
            len(self._waiting) >= self._max_requests or self.tokens + tokens > self._max_tokens
        ):
            raise QueueFull(
                "Too many texts wait for their embeddings; try again later.", retry_after=retry_after
            )
        entries = [Entry(request, index, length) for index, length in enumerate(lengths)]
        self._waiting[request] = sorted(entries, key=_longest_first)
        self.tokens += tokens

    def drop(self, request: K) -> None:
        """Its texts are not wanted any more. Unknown requests are ignored."""
        self.tokens -= sum(entry.length for entry in self._waiting.pop(request, ()))

    def take(self, max_tokens: int, max_texts: int, *, padding: bool = True) -> list[Entry[K]]:
        """The next batch; empty if nothing waits.

        Its padded size (texts times the longest) is at most `max_tokens`, unless it is one text, which
        cannot be split. Without `padding` all its texts are of one length.
        """
        if not self._waiting:
            return []
        turn, entries = next(iter(self._waiting.items()))
        longest = entries[0].length
        rows = min(max_texts, max(1, max_tokens // max(1, longest)))
        chosen = [entries[0], *islice(self._shorter(longest, padding, entries[0]), rows - 1)]
        taken = set(chosen)
        for request in {entry.request for entry in chosen}:
            left = [entry for entry in self._waiting[request] if entry not in taken]
            if left:
                self._waiting[request] = left
            else:
                del self._waiting[request]
        if turn in self._waiting:
            self._waiting[turn] = self._waiting.pop(turn)
        self.tokens -= sum(entry.length for entry in chosen)
        return chosen

    def _shorter(self, longest: int, padding: bool, leader: Entry[K]) -> Iterator[Entry[K]]:
        """Texts of at most `longest` tokens, the longest first; among equals by turn."""
        fitting = (
            islice(entries, _first_of_at_most(entries, longest), None) for entries in self._waiting.values()
        )
        for entry in heapq.merge(*fitting, key=_longest_first):
            if entry.length < longest and not padding:
                return
            if entry is not leader:
                yield entry


def _longest_first(entry: Entry[K]) -> int:
    return -entry.length


def _first_of_at_most(entries: Sequence[Entry[K]], longest: int) -> int:
    return bisect_left(entries, -longest, key=_longest_first)
