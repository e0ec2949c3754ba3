"""How much a client may ask, by a clock that stands still until it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.security import rates as module
from chairlift.server.security.rates import Admitted, Allowance, Rates, RateSettings, Refused, TokenWindow


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def rates(**limits: int) -> tuple[Rates, Clock]:
    clock = Clock()
    return Rates(RateSettings(**limits), clock), clock


def test_requests_within_a_minute() -> None:
    book, clock = rates(requests_per_minute=3)
    left = []
    for seconds in (0, 10, 10):
        clock.now += seconds
        admitted = book.admit("a")
        assert isinstance(admitted, Admitted) and admitted.tokens is None and admitted.requests is not None
        left.append((admitted.requests.remaining, admitted.requests.reset_s))
    assert left == [(2, 60), (1, 60), (0, 60)]
    clock.now += 15
    refused = book.admit("a")
    assert isinstance(refused, Refused) and (refused.what, refused.limit) == ("requests", 3)
    assert refused.retry_s == pytest.approx(25, abs=0.01)
    assert refused.requests == Allowance(3, 0, 45)
    assert isinstance(book.admit("b"), Admitted)
    clock.now += refused.retry_s - 0.01
    assert isinstance(book.admit("a"), Refused)
    clock.now += 0.02
    assert isinstance(book.admit("a"), Admitted)
    assert isinstance(book.admit("a"), Refused)


def test_what_is_refused_does_not_count() -> None:
    book, clock = rates(requests_per_minute=1)
    book.admit("a")
    for _ in range(50):
        clock.now += 1
        assert isinstance(book.admit("a"), Refused)
    clock.now += 10.01
    assert isinstance(book.admit("a"), Admitted)


def test_requests_at_once() -> None:
    book, clock = rates(concurrent=2)
    assert [type(book.admit("a")) for _ in range(3)] == [Admitted, Admitted, Refused]
    assert isinstance(book.admit("b"), Admitted)
    clock.now += 1000
    assert isinstance(book.admit("a"), Refused)
    book.release("a", 0)
    assert [type(book.admit("a")) for _ in range(2)] == [Admitted, Refused]


def test_tokens_within_a_minute() -> None:
    book, clock = rates(tokens_per_minute=100)

    def take(tokens: int) -> Allowance:
        admitted = book.admit("a")
        assert isinstance(admitted, Admitted) and admitted.tokens is not None
        book.release("a", tokens)
        return admitted.tokens

    assert take(60) == Allowance(100, 100, 0)
    clock.now += 20
    assert take(300) == Allowance(100, 40, 40)  # the last one admitted may overshoot
    refused = book.admit("a")
    assert isinstance(refused, Refused) and (refused.what, refused.retry_s) == ("tokens", 60)
    assert refused.tokens == Allowance(100, 0, 60)
    clock.now += 59
    assert isinstance(book.admit("a"), Refused)
    clock.now += 1
    assert take(0) == Allowance(100, 100, 0)


def test_a_refused_request_takes_no_place_of_another_limit() -> None:
    book, clock = rates(requests_per_minute=5, concurrent=1)
    book.admit("a")
    for _ in range(9):
        assert isinstance(book.admit("a"), Refused)
    book.release("a", 0)
    admitted = book.admit("a")
    assert isinstance(admitted, Admitted) and admitted.requests == Allowance(5, 3, 60)


def test_clients_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 10)
    book, clock = rates(requests_per_minute=5, tokens_per_minute=5)
    for number in range(9):
        book.admit(str(number))
        book.release(str(number), 1)
    book.admit("stays")
    clock.now += 61
    book.admit("new")
    assert set(book._accounts) == {"stays", "new"}
    book.release("stays", 3)
    clock.now += 1
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 1)
    book.admit("newer")
    assert {"stays", "newer"} <= set(book._accounts)


def test_nothing_set_is_nothing_limited() -> None:
    assert not RateSettings() and RateSettings(concurrent=1) and RateSettings(tokens_per_minute=0)


events = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), max_size=20)


@settings(deadline=None)
@given(events, st.integers(1, 100))
def test_the_window_of_tokens_is_the_sum_of_a_minute(steps: list[tuple[int, int]], limit: int) -> None:
    window, now, spent = TokenWindow(), 0.0, []
    for seconds, tokens in steps:
        now += seconds
        window.add(now, tokens)
        spent.append((now, tokens))

    def sum_at(moment: float) -> int:
        return sum(tokens for at, tokens in spent if at > moment - 60)

    assert window.used(now) == sum_at(now)
    wait = window.below(limit, now)
    assert sum_at(now + wait) < limit
    assert wait == 0 or sum_at(now + wait - 0.5) >= limit


@settings(deadline=None)
@given(st.lists(st.integers(0, 30_000), max_size=30), st.integers(1, 5))
def test_never_more_requests_than_allowed_within_any_minute(gaps: list[int], limit: int) -> None:
    book, clock = rates(requests_per_minute=limit)
    clock.now = 0.0
    ask: Callable[[], bool] = lambda: isinstance(book.admit("a"), Admitted)  # noqa: E731
    taken: list[int] = []
    millisecond = 0
    for gap in gaps:
        millisecond += gap
        clock.now = millisecond / 1000
        within = sum(at >= millisecond - 60_000 for at in taken)
        admitted = ask()
        assert admitted == (within < limit)
        if admitted:
            taken.append(millisecond)
