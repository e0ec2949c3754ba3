"""Whether a service answers, asked of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from chairlift.server.service.exits import code_in_words
from chairlift.server.service.record import Record, RecordFile, Run
from chairlift.server.service.supervisor import Supervisor

POLL_S = 0.5
PROBE_S = 5.0
BIRTH_S = 20.0
"""Seconds that a process may take from its start to its first note."""


def probe(url: str) -> str | None:
    """What `/health/ready` says of the server: ready, loading, draining, stalled; None: nobody answers."""
    try:
        # Its own certificate may be for a name from outside.
        answer = httpx.get(f"{url}/health/ready", timeout=PROBE_S, verify=False, trust_env=False)
        status = answer.json().get("status")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return None
    return str(status)


@dataclass(frozen=True, slots=True)
class Waited:
    """What came of a start. `url` where it is ready, else `why` not."""

    url: str | None = None
    why: str = ""
    loading: bool = False
    """It may still become ready."""


def await_ready(
    supervisor: Supervisor,
    file: RecordFile,
    *,
    since: float,
    bound_s: float,
    ask: Callable[[str], str | None] = probe,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> Waited:
    """Wait until a service that has just been started answers, or will not.

    Args:
        since: when it was started; earlier runs do not count.
        bound_s: how long to wait.
    """
    while True:
        record = file.read()
        run = record.run if record.run is not None and record.run.started >= since else None
        if (waited := _outcome(record, run, ask)) is not None:
            return waited
        passed = clock() - since
        if run is None and passed > BIRTH_S and (seen := supervisor.seen()).pid is None:
            return Waited(why=f"It does not start: {seen.last_exit or seen.state or 'no reason is known'}.")
        if passed > bound_s:
            return Waited(why=f"It is not ready after {bound_s:.0f} s; it still loads.", loading=True)
        pause(POLL_S)


def _outcome(record: Record, run: Run | None, ask: Callable[[str], str | None]) -> Waited | None:
    """None: not yet known."""
    if run is None:
        return None
    if run.ended is not None:
        if record.gave_up is not None:
            return Waited(why=f"It gave up: {record.gave_up}.")
        code = run.ended.code
        how = "it was killed" if code is None else code_in_words(code)
        return Waited(why=run.ended.reason or f"It ended: {how}.")
    if run.ready is not None and run.url is not None and ask(run.url) == "ready":
        return Waited(url=run.url)
    return None
