"""Whether tokens are sooner fetched from the disk than computed again, by what both took so far. Pure.

On a fast GPU a small model computes a prompt sooner than a disk gives its keys and values: on an H200
Qwen3-0.6B's shape takes 1.3 s for 32,000 tokens, which are 3.7 GB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

SAMPLES = 9
"""Fetches whose median counts."""
SHORT = 0.25
"""Seconds: what would take no longer is fetched without more ado."""
RETRY = 16
"""One in so many fetches that are not worth it is made all the same: the disk may be faster by now."""


@dataclass(slots=True)
class FetchWorth:
    """
    Args:
        computes: tokens a second that prompts are computed at; None as long as that is not known.
    """

    computes: Callable[[], float | None]
    refused: int = 0
    """Fetches that were not made."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Bytes a second, from asking until all is there."""

    def fetched(self, nbytes: int, seconds: float) -> None:
        """A whole fetch took so long. One that is short, and was to be, tells nothing of long ones: most of
        its time it waited for a step."""
        expected = nbytes / median(self._rates) if self._rates else 0.0
        if nbytes > 0 and seconds > 0 and max(seconds, expected) > SHORT:
            self._rates.append(nbytes / seconds)

    def of(self, nbytes: int, tokens: int) -> bool:
        """Whether so many bytes should be fetched in place of computing so many tokens."""
        computes = self.computes()
        if computes is None or not self._rates:
            return True
        if nbytes / median(self._rates) <= max(SHORT, tokens / computes):
            return True
        self.refused += 1
        return self.refused % RETRY == 0
