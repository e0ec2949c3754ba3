"""Who prefills in a step, and how many tokens: pure.

The oldest row gets at least a quarter of the budget, so everyone's turn comes; the rest goes to those that
gave their state up, which no other passes, then to the others by priority, then to the shortest first, so a
short prompt does not wait behind a long one.
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.engine.row import Row

MIN_CHUNK = 16
"""Tokens: no span is shorter unless it ends its row's prefill (or the budget is smaller), and none leaves a
shorter rest where that can be avoided."""
OLDEST = 4
"""The oldest row's part of the budget is one in so many."""
LARGE_BUDGET = 512
"""Budgets from here on are cut into even chunks; small ones are used to the last token."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """
    Attributes:
        least: tokens of a span that does not end its row's prefill.
        grain: such a span is a multiple of this.
    """

    least: int
    grain: int

    @classmethod
    def of(cls, budget: int) -> Sharing:
        """For steps of so many tokens at most."""
        return cls(min(MIN_CHUNK, budget), budget // 16 if budget >= LARGE_BUDGET else 1)

    def share(self, candidates: list[Row], budget: int) -> list[tuple[Row, int]]:
        """(row, tokens) of this step's spans, at most `budget` tokens together; the oldest row first."""
        if not candidates:
            return []
        oldest = min(candidates, key=lambda row: row.arrival)
        reserved = self._reserve(oldest.remaining, budget)
        others = sorted(
            (row for row in candidates if row is not oldest),
            key=lambda row: (not row.preempted, row.request.priority, row.remaining, row.arrival),
        )
        left = budget - reserved
        grants: list[tuple[Row, int]] = []
        for row in others:
            tokens = self._chunk(row.remaining, left, least=self.least)
            if tokens:
                grants.append((row, tokens))
                left -= tokens
            elif row.preempted:
                break  # what is too little for it is nobody's
        return [(oldest, self._chunk(oldest.remaining, left + reserved, least=reserved)), *grants]

    def _reserve(self, remaining: int, budget: int) -> int:
        """Tokens the oldest row gets at least: its part, more to end its prefill without a stub."""
        part = max(-(-budget // OLDEST), self.least)
        return min(remaining, budget) if remaining < part + self.least else part

    def _chunk(self, remaining: int, room: int, *, least: int) -> int:
        """Tokens of a span: what fits, and neither a stub (unless that ends the row) nor all but a stub.

        A chunk that does not end its row is a multiple of `grain`: a device plans anew for every new
        length."""
        if remaining <= room:
            return remaining
        if room < self.least:
            return 0
        even = room - room % self.grain
        if remaining - room < self.least:
            even = room - (self.least - (remaining - room))
        return even if even >= least else room
