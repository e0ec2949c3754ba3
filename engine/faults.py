"""What becomes of rows and pages where a row or a step goes wrong. On the MLX thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.flight import NOT_A_NUMBER, Flight, blame
from chairlift.engine.pages import PageStore
from chairlift.engine.plan import Span
from chairlift.engine.residents import Residents

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Faults:
    """Those of a runner, whose rows and pages these are."""

    residents: Residents
    pages: PageStore

    def end_failed(self, flight: Flight, row: int) -> None:
        """A row that could not draw. Where it began with kept pages and is not a number, these may be why:
        they go, and it starts again without them."""
        self.residents.rows.pop(row, None)
        if row in flight.restored and flight.failed[row] == NOT_A_NUMBER:
            log.error("row %d began with kept pages and is not a number in step %d", row, flight.number)
            self.pages.distrust(flight.restored[row])
            flight.lost[row] = flight.failed.pop(row)

    def fail_row(self, flight: Flight, row: int, error: Exception) -> None:
        """A row whose own forward could not be built; no other took part in it."""
        log.error("row %d failed in step %d", row, flight.number, exc_info=error)
        self.residents.rows.pop(row, None)
        flight.failed[row] = blame(error)

    def fail_step(
        self, flight: Flight, decode: Sequence[int], spans: Sequence[Span], error: Exception
    ) -> None:
        """A step that could not be built: prefilling rows are at fault, all others are lost."""
        message = blame(error)
        self._forget(flight)
        self.residents.drop([*decode, *(span.row for span in spans)])
        flight.failed.update({span.row: message for span in spans})
        flight.lost.update(dict.fromkeys(decode, message))

    def lose(self, flight: Flight, message: str) -> None:
        """A step whose computation failed: its rows' state is gone."""
        self.residents.drop(flight.rows)
        flight.lost.update({row: message for row in flight.rows if row not in flight.failed})
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        """Nothing of the step can be used, the pages saved in it included."""
        flight.forget()
        self.pages.spoil(*flight.saves)
