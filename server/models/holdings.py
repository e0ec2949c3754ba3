"""The bytes that loaded models hold of the process's budget."""

from __future__ import annotations

from chairlift.engine.memory.budget import Budget, Kind, Reservation


class Holdings:
    """Of every model, by the name of its entry. No budget: there is no bound, and nothing is held."""

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget
        self._reservations: dict[str, Reservation] = {}

    @property
    def available(self) -> int | None:
        """Bytes that may be reserved; None: there is no bound."""
        return None if self.budget is None else self.budget.available

    def reserve(self, name: str, size: int, owner: str) -> None:
        """Room that is known to be there, for a load."""
        if self.budget is not None:
            reservation = self.budget.reserve(size, Kind.WEIGHTS, owner)
            assert isinstance(reservation, Reservation), "the roster was told that there is room"
            self._reservations[name] = reservation

    def of(self, name: str) -> Reservation | None:
        return self._reservations.get(name)

    def claim(self, name: str, size: int) -> None:
        """It is loaded, and its weights take this."""
        if (reservation := self.of(name)) is not None:
            reservation.claim(size)

    def release(self, name: str) -> None:
        """Idempotent."""
        if (reservation := self._reservations.pop(name, None)) is not None:
            reservation.release()

    def owned(self, owner: str) -> int:
        """Bytes of an owner, those for its steps among them."""
        reservations = self.budget.reservations if self.budget is not None else ()
        return sum(each.size for each in reservations if each.owner == owner)
