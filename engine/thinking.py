"""How long a row may think: its tokens are counted, and at the bound the thinking is ended for it.

Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass

OPENS_WITHIN = 4
"""First tokens of an answer among which the mark that opens the thinking stands, if there is thinking."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Of one answer."""

    most: int
    """Tokens of thinking, marks apart; from 0."""
    end: int
    """The token that ends the thinking."""
    start: int | None = None
    """The token that opens it; None where the prompt has done so."""


class ThinkingCount:
    """Follows the tokens of one row, up to the last one that the host has seen."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._open = budget.start is None
        self._seen = 0
        self._thought = 0
        self.over = False
        """The thinking has ended, or there was none."""

    def advance(self, token: int) -> None:
        """The row has drawn the token."""
        self._seen += 1
        if self.over:
            return
        if not self._open:
            self._open = token == self._budget.start
            self.over = not self._open and self._seen >= OPENS_WITHIN
        elif token == self._budget.end:
            self.over = True
        else:
            self._thought += 1

    def waits(self, drawn: int) -> bool:
        """Whether the draw behind `drawn` tokens may have to end the thinking: the last of them may not have
        been seen."""
        return not self.over and self._thought + (drawn - self._seen) >= self._budget.most

    @property
    def forced(self) -> int | None:
        """The token that the row has to draw next, if it has thought enough."""
        enough = self._open and not self.over and self._thought >= self._budget.most
        return self._budget.end if enough else None
