"""Bytes of one device: nobody gets what somebody else has."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from chairlift.engine.memory.budget import Account, Budget, Kind, Reservation, Shortage


def reserved(budget: Budget, size: int, kind: Kind = Kind.WEIGHTS) -> Reservation:
    got = budget.reserve(size, kind)
    assert isinstance(got, Reservation)
    return got


def account(budget: Budget, pages: int = 0, pinned: int = 0) -> Account:
    """Of an engine that keeps so many bytes of pages, some of which never go."""

    def shrink(size: int) -> int:
        return min(size, one.pages - pinned)

    one = budget.account("a model", shrink)
    one.pages = pages
    return one


def test_a_load_in_flight_is_reserved() -> None:
    """FIELD-NOTES: two models loaded at once, each of which would have fitted alone."""
    budget = Budget(1000)
    first = reserved(budget, 600)
    assert budget.reserve(600, Kind.WEIGHTS) == Shortage(needed=600, available=400, total=1000)
    first.release()
    first.release()
    assert budget.available == 1000
    assert isinstance(budget.reserve(600, Kind.WEIGHTS), Reservation)


def test_a_shortage_says_the_numbers() -> None:
    refusal = Budget(1000).reserve(1001, Kind.WEIGHTS)
    assert str(refusal) == "1.001 kB are needed and 1 kB of 1 kB are free"


def test_a_reservation_may_change() -> None:
    budget = Budget(1000)
    load = reserved(budget, 800)
    load.claim(500)
    assert budget.available == 500
    load.claim(1200)
    assert (budget.for_requests, budget.available) == (-200, 0)


def test_pages_go_for_a_load_and_rows_do_not() -> None:
    budget = Budget(1000)
    one = account(budget, pages=400)
    one.use(300)
    assert budget.reserve(701, Kind.WEIGHTS) == Shortage(701, 700, 1000)
    reserved(budget, 500)
    assert (one.rows, one.pages) == (300, 200)


def test_what_was_accepted_stays_possible() -> None:
    budget = Budget(1000)
    one = account(budget)
    one.least = 600
    assert budget.reserve(401, Kind.WEIGHTS) == Shortage(401, 400, 1000)
    reserved(budget, 400)


def test_rows_push_out_pages_their_own_engines_first() -> None:
    budget = Budget(1000)
    other, one = account(budget, pages=300), account(budget, pages=300, pinned=100)
    one.use(500)
    assert (other.pages, one.pages) == (300, 200)
    one.use(650)
    assert (other.pages, one.pages) == (250, 100)
    assert (one.room, other.room) == (1000, 350)


def test_who_waits_is_woken_when_bytes_come_free() -> None:
    budget = Budget(1000)
    woken: list[str] = []
    waiting = budget.account("waiting", lambda size: 0, lambda: woken.append("waiting"))
    busy = budget.account("busy", lambda size: 0, lambda: woken.append("busy"))
    busy.use(900)
    waiting.waiting_since = 3.0
    assert busy.yields == 3.0 and waiting.yields is None
    busy.use(950)
    assert woken == []
    busy.use(100)
    assert woken == ["waiting"]
    load = reserved(budget, 100)
    load.release()
    busy.close()
    busy.close()
    assert woken == ["waiting"] * 3
    assert budget.accounts == [waiting]


@given(
    st.integers(0, 100),
    st.lists(
        st.tuples(st.sampled_from(["reserve", "shrink", "release", "rows", "pages"]), st.integers(0, 60))
    ),
)
def test_reservations_rows_and_pages_never_exceed_the_total(total: int, steps: list[tuple[str, int]]) -> None:
    """As long as rows take no more than their room."""
    budget = Budget(total)
    accounts = [account(budget), account(budget)]
    reservations: list[Reservation] = []
    for at, (what, size) in enumerate(steps):
        one = accounts[at % 2]
        match what:
            case "reserve":
                before = budget.available
                got = budget.reserve(size, Kind.WEIGHTS)
                assert isinstance(got, Reservation) == (size <= before)
                reservations += [got] if isinstance(got, Reservation) else []
            case "shrink" if reservations:
                one_of = reservations[at % len(reservations)]
                one_of.claim(min(size, one_of.size))
            case "release" if reservations:
                reservations.pop(at % len(reservations)).release()
            case "rows":
                one.use(min(size, one.room))
            case "pages":
                one.pages = max(0, min(size, budget.for_requests - sum(a.rows for a in accounts)))
                one.use(one.rows)
        used = sum(budget.used(kind) for kind in Kind)
        assert used <= total
        assert budget.used(Kind.WEIGHTS) == sum(each.size for each in reservations)
