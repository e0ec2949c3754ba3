"""Told to stop under load: whatever was accepted ends with its answer, or is told why not."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator

from tests.faults.exchange import Reply, ask, exchange, letters_after, request_bytes
from tests.faults.fake_server import MODEL, Options, fake_serving
from tests.served.process import Served

COMPLETIONS, CHAT, MESSAGES, RESPONSES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
)
SEATS = 24
ENDLESS = 10**5
SOON = 40.0
"""Seconds after which an answer that does not end fails its test."""


def bodies(count: int, tokens: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Of every surface, streamed and whole."""
    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens}
    kinds: list[tuple[str, dict[str, object]]] = [
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": tokens, "temperature": 0}),
        (CHAT, {**said, "temperature": 0}),
        (MESSAGES, said),
        (RESPONSES, {"input": "Hi", "max_output_tokens": tokens}),
    ]
    for number in range(count):
        path, body = kinds[number % len(kinds)]
        yield path, {**body, "model": MODEL, "stream": number // len(kinds) % 2 == 0}


def begin(served: Served, count: int, tokens: int) -> list[asyncio.Task[Reply]]:
    """Ask for them all at once."""
    return [asyncio.create_task(ask(served.port, *each, patience=SOON)) for each in bodies(count, tokens)]


async def until(served: Served, running: int, waiting: int) -> None:
    """So many are on their way."""
    async with asyncio.timeout(20):
        while True:
            health = (await exchange(served.port, request_bytes("/health", method="GET"))).json
            if (health["running"], health["waiting"]) == (running, waiting):
                return
            await asyncio.sleep(0)


def how(reply: Reply) -> str:
    """The end of an answer: `answered`, `error` within an answer that had begun, a status, or `lost`."""
    if reply.end in ("cut", "unanswered"):
        return "lost"
    if reply.status != 200:
        return str(reply.status)
    return "answered" if reply.end == "answered" else "error"


async def test_every_request_has_its_end_when_the_time_to_drain_is_over() -> None:
    """Those that run, those that wait, and those that come meanwhile."""
    with fake_serving(Options(seqs=SEATS, drain_s=0.5)) as served:
        asked = begin(served, 3 * SEATS, ENDLESS)
        await until(served, SEATS, 2 * SEATS)
        served.signal(signal.SIGTERM)
        late: Counter[str] = Counter()
        while (reply := await ask(served.port, *next(bodies(1, ENDLESS)), patience=SOON)).status is not None:
            late[how(reply)] += 1
        ends = Counter(how(reply) for reply in await asyncio.gather(*asked))
        assert (served.exit_code(), served.complaints) == (0, "")
    assert ends["lost"] == ends["answered"] == 0 and ends.total() == 3 * SEATS
    assert set(ends) <= {"error", "503", "529", "lost", "answered"} and ends["error"] >= SEATS / 2, ends
    assert late["lost"] == 0 and late["503"] > 0 and set(late) <= {"error", "503", "lost"}


async def test_what_runs_is_answered_and_what_waits_is_refused() -> None:
    with fake_serving(Options(seqs=SEATS, step_ms=2)) as served:
        asked = begin(served, SEATS, 300)
        await until(served, SEATS, 0)
        waiting = begin(served, SEATS, 300)
        await until(served, SEATS, SEATS)
        served.signal(signal.SIGTERM)
        replies = await asyncio.gather(*asked)
        refused = await asyncio.gather(*waiting)
        assert (served.exit_code(), served.complaints) == (0, "")
    assert Counter(map(how, replies)) == {"answered": SEATS}
    assert replies[0].text == letters_after("Hi", 300)
    ends = Counter(map(how, refused))
    assert ends["answered"] == ends["lost"] == 0 and ends.total() == SEATS, ends


async def test_a_second_signal_does_not_wait_for_them() -> None:
    with fake_serving(Options(seqs=SEATS, drain_s=3600)) as served:
        asked = begin(served, SEATS, ENDLESS)
        await until(served, SEATS, 0)
        served.signal(signal.SIGTERM)
        while (await exchange(served.port, request_bytes("/health/ready", method="GET"))).status == 200:
            await asyncio.sleep(0)
        served.signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.exit_code) == 0
        assert {reply.whole for reply in await asyncio.gather(*asked)} == {False}
