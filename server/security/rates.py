"""How much each client may ask: requests and tokens within a minute, and requests at once.

Pure but for its clock, and one thread's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pyrate_limiter import InMemoryBucket, Rate, RateItem

MINUTE_S = 60.0
CLOCK_S = 0.001
"""What the requests' clock counts in; the window holds both of its ends."""
MOST_ACCOUNTS = 10_000
"""Before those of clients that have not asked for a minute are looked for and dropped."""


@dataclass(frozen=True, slots=True)
class RateSettings:
    """Of each client; None: as many as there are."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    concurrent: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit."""

    limit: int
    remaining: int
    reset_s: float
    """Until all of it is there again."""


@dataclass(frozen=True, slots=True)
class Admitted:
    requests: Allowance | None
    tokens: Allowance | None


@dataclass(frozen=True, slots=True)
class Refused:
    """`what`: `requests`, `tokens` or `concurrent`."""

    what: str
    limit: int
    retry_s: float
    requests: Allowance | None
    tokens: Allowance | None


class TokenWindow:
    """Tokens of the last minute. They are known when an answer has ended, so the limit may be overshot by
    what runs at that time; then nothing is admitted until enough of them are a minute old."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, now: float, tokens: int) -> None:
        if tokens:
            self._spent.append((now, tokens))
            self._total += tokens

    def used(self, now: float) -> int:
        while self._spent and self._spent[0][0] <= now - MINUTE_S:
            self._total -= self._spent.popleft()[1]
        return self._total

    def below(self, limit: int, now: float) -> float:
        """Seconds until fewer than `limit` are left."""
        left = self.used(now)
        for at, tokens in self._spent:
            if left < limit:
                break
            left -= tokens
            wait = at + MINUTE_S - now
            if left < limit:
                return wait
        return 0.0


@dataclass(slots=True)
class _Account:
    requests: InMemoryBucket | None
    tokens: TokenWindow = field(default_factory=TokenWindow)
    running: int = 0


class Rates:
    """Args: clock: monotonic seconds."""

    def __init__(self, settings: RateSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, client: str) -> Admitted | Refused:
        """One more request of this client, which `release` ends if it is admitted."""
        now = self._clock()
        account = self._accounts.get(client) or self._open(client, now)
        settings = self._settings
        refused = self._full(account, now)
        if refused is None and account.requests is not None:
            bucket, item = account.requests, RateItem(client, _milliseconds(now))
            bucket.leak(item.timestamp)
            if not bucket.put(item):
                assert settings.requests_per_minute is not None
                oldest = bucket.peek(settings.requests_per_minute - 1)
                since_s = 0.0 if oldest is None else now - oldest.timestamp / 1000
                refused = ("requests", settings.requests_per_minute, MINUTE_S + CLOCK_S - since_s)
        requests, tokens = self._requests(account, now), self._tokens(account, now)
        if refused is not None:
            return Refused(*refused, requests, tokens)
        account.running += 1
        return Admitted(requests, tokens)

    def release(self, client: str, tokens: int) -> None:
        """A request has ended, and has taken so many tokens."""
        account = self._accounts[client]
        account.running -= 1
        account.tokens.add(self._clock(), tokens)

    def _full(self, account: _Account, now: float) -> tuple[str, int, float] | None:
        settings = self._settings
        if settings.concurrent is not None and account.running >= settings.concurrent:
            return "concurrent", settings.concurrent, 1.0
        limit = settings.tokens_per_minute
        if limit is not None and account.tokens.used(now) >= limit:
            return "tokens", limit, account.tokens.below(limit, now)
        return None

    def _open(self, client: str, now: float) -> _Account:
        if len(self._accounts) >= MOST_ACCOUNTS:
            self._drop_idle(now)
        limit = self._settings.requests_per_minute
        bucket = None if limit is None else InMemoryBucket([Rate(limit, _milliseconds(MINUTE_S))])
        account = self._accounts[client] = _Account(bucket)
        return account

    def _drop_idle(self, now: float) -> None:
        for client, account in list(self._accounts.items()):
            if account.requests is not None:
                account.requests.leak(_milliseconds(now))
            asked = account.requests is not None and account.requests.count() > 0
            if not (asked or account.running or account.tokens.used(now)):
                del self._accounts[client]

    def _requests(self, account: _Account, now: float) -> Allowance | None:
        bucket, limit = account.requests, self._settings.requests_per_minute
        if bucket is None or limit is None:
            return None
        newest = bucket.peek(0)
        reset_s = 0.0 if newest is None else newest.timestamp / 1000 + MINUTE_S - now
        return Allowance(limit, limit - bucket.count(), reset_s)

    def _tokens(self, account: _Account, now: float) -> Allowance | None:
        limit = self._settings.tokens_per_minute
        if limit is None:
            return None
        used = account.tokens.used(now)
        return Allowance(limit, max(0, limit - used), account.tokens.below(1, now))


def _milliseconds(seconds: float) -> int:
    return math.floor(seconds * 1000)
