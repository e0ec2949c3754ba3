"""Who may use how many bytes of a device: one budget for everything that a process keeps there. Pure.

What is fixed (weights, headroom, the process itself) is **reserved**, all of it before it is made, so that
two loads at once can never count on the same bytes. What comes and goes with requests is an **account** of
each engine: the states of its rows, and pages kept for later ones, which go when somebody needs their room.

Not thread-safe: called on the event loop. `Account.most` may be read anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from chairlift.engine.quantities import size


class Kind(StrEnum):
    """What bytes are used for."""

    PROCESS = "process"
    """What the process needs beside its models."""
    WEIGHTS = "weights"
    HEADROOM = "headroom"
    """For what a step computes, and for the allocator."""
    ROWS = "rows"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A refusal: so many bytes were asked for, and so many are there."""

    needed: int
    available: int
    total: int

    def __str__(self) -> str:
        needed, available, total = (size(each, 4) for each in (self.needed, self.available, self.total))
        return f"{needed} are needed and {available} of {total} are free"


class Reservation:
    """Bytes that nobody else can have until `release`."""

    def __init__(self, budget: Budget, size: int, kind: Kind, owner: str) -> None:
        self.size = size
        self.kind = kind
        self.owner = owner
        self._budget = budget

    def claim(self, size: int) -> None:
        """So many bytes are in use, whether there was room or not: rows make it."""
        self._budget.change(self, size)

    def release(self) -> None:
        """Idempotent."""
        self._budget.change(self, 0)
        self._budget.reservations.discard(self)
        self._budget.comings += 1


class Account:
    """What one engine uses of a budget for requests.

    Args:
        owner: the model's name.
        shrink: has the engine let go of so many bytes of kept pages, or of what it has if that is less; says
            how many these were. They are free once the engine's next plan is carried out.
        wake: bytes have come free that the engine may be waiting for.
    """

    def __init__(
        self, budget: Budget, owner: str, shrink: Callable[[int], int], wake: Callable[[], None]
    ) -> None:
        self.owner = owner
        self.shrink = shrink
        self.wake = wake
        self.rows = 0
        """Bytes of its rows' states."""
        self.pages = 0
        """Bytes of its kept pages."""
        self.least = 0
        """Bytes that have to stay attainable for its rows: of the largest request that was accepted."""
        self.waiting_since: float | None = None
        """When that of its requests came which is next and waits for memory. No engine admits younger ones
        before that."""
        self._budget = budget

    @property
    def changes(self) -> int:
        """Grows whenever it may have become possible to admit rows."""
        return self._budget.changes

    @property
    def others(self) -> int:
        """Bytes of other engines' rows."""
        return sum(other.rows for other in self._budget.accounts if other is not self)

    @property
    def others_pages(self) -> int:
        """Bytes of other engines' pages, which its own pages do not push out."""
        return sum(other.pages for other in self._budget.accounts if other is not self)

    @property
    def room(self) -> int:
        """Bytes that its rows and pages together may take; other engines' pages would go."""
        return self._budget.for_requests - self.others

    @property
    def most(self) -> int:
        """Bytes that it may have at some time, when others have none."""
        return max(0, self._budget.for_requests)

    @property
    def yields(self) -> float | None:
        """When the oldest request came for which other engines are to keep their memory."""
        since = [other.waiting_since for other in self._budget.accounts if other is not self]
        return min((when for when in since if when is not None), default=None)

    def use(self, rows: int) -> None:
        """Its rows are to take so many bytes from the next plan on: pages that are in their way go, its own
        first."""
        freed = rows < self.rows
        self.rows = rows
        self._budget.push_out(first=self)
        if freed:
            self._budget.wake(self)

    def wait(self, since: float | None) -> None:
        """That of its requests which is next and waits for memory came then; None waits."""
        if since != self.waiting_since:
            self.waiting_since = since
            self._budget.wake(self)

    def close(self) -> None:
        """The engine is gone. Idempotent."""
        if self in self._budget.accounts:
            self._budget.accounts.remove(self)
            self._budget.wake(self)


class Budget:
    """Args: total: bytes that the process may use of the device."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.reservations: set[Reservation] = set()
        self.accounts: list[Account] = []
        self.reserved = 0
        """Bytes of all reservations."""
        self.changes = 0
        self.comings = 0
        """Grows whenever anybody comes or goes."""
        self.cache = 0
        """Bytes of freed buffers that the allocator may keep: the most that an engine has reserved for it."""

    def reserve(self, size: int, kind: Kind, owner: str = "") -> Reservation | Shortage:
        """So many bytes for good. Kept pages go for them; rows do not, and every request that was accepted
        stays possible. A shortage changes nothing."""
        if (shortage := self.shortage(size)) is not None:
            return shortage
        reservation = Reservation(self, 0, kind, owner)
        self.reservations.add(reservation)
        self.comings += 1
        self.change(reservation, size)
        return reservation

    def hold(self, kind: Kind, owner: str = "") -> Reservation:
        """Of nothing yet, for `claim`."""
        reservation = self.reserve(0, kind, owner)
        assert isinstance(reservation, Reservation)
        return reservation

    def account(
        self, owner: str, shrink: Callable[[int], int], wake: Callable[[], None] = lambda: None
    ) -> Account:
        account = Account(self, owner, shrink, wake)
        self.accounts.append(account)
        return account

    @property
    def for_requests(self) -> int:
        """Bytes left to all rows and pages together; below 0 where more is in use than there is."""
        return self.total - self.reserved

    @property
    def available(self) -> int:
        """Bytes that may still be reserved."""
        rows = sum(account.rows for account in self.accounts)
        least = max((account.least for account in self.accounts), default=0)
        return max(0, self.for_requests - max(rows, least))

    @property
    def used_by_requests(self) -> int:
        return self.used(Kind.ROWS) + self.used(Kind.PREFIX)

    def used(self, kind: Kind) -> int:
        """Bytes, by what they are used for."""
        if kind is Kind.ROWS:
            return sum(account.rows for account in self.accounts)
        if kind is Kind.PREFIX:
            return sum(account.pages for account in self.accounts)
        return sum(reservation.size for reservation in self.reservations if reservation.kind is kind)

    def shortage(self, size: int) -> Shortage | None:
        """Why so many bytes more cannot be reserved."""
        return Shortage(size, self.available, self.total) if size > self.available else None

    # For reservations and accounts

    def change(self, reservation: Reservation, size: int) -> None:
        freed = size < reservation.size
        self.reserved += size - reservation.size
        reservation.size = size
        self.push_out()
        if freed:
            self.wake(None)

    def push_out(self, first: Account | None = None) -> None:
        """Have pages go that are in the way of what is in use, those of `first` before others'."""
        excess = sum(account.rows + account.pages for account in self.accounts) - self.for_requests
        for account in sorted(self.accounts, key=lambda account: account is not first):
            if excess > 0:
                freed = account.shrink(excess)
                account.pages -= freed
                excess -= freed

    def wake(self, but: Account | None) -> None:
        self.changes += 1
        for account in list(self.accounts):
            if account is not but and account.waiting_since is not None:
                account.wake()
