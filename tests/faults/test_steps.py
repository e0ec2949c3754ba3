"""A step that raises, and one that never comes back, in a server with requests on their way."""

from __future__ import annotations

import asyncio
from collections import Counter

from chairlift.server.configuration.read import read
from chairlift.server.configuration.serving import server_settings
from chairlift.server.lifecycle import WATCHDOG_EXIT
from tests.faults.exchange import ask, exchange, letters_after, request_bytes
from tests.faults.fake_server import BAD, HANGING, MODEL, Options, fake_serving
from tests.faults.test_stop import COMPLETIONS, ENDLESS, SOON, begin, how, until
from tests.served.process import Served

SEATS = 8


async def status(served: Served, path: str) -> int | None:
    return (await exchange(served.port, request_bytes(path, method="GET"))).status


async def test_a_step_that_raises_ends_what_was_in_it_and_the_server_goes_on() -> None:
    with fake_serving(Options(seqs=SEATS)) as served:
        asked = begin(served, SEATS - 1, ENDLESS)
        await until(served, SEATS - 1, 0)
        body = {"model": MODEL, "prompt": BAD, "max_tokens": 5}
        bad = await ask(served.port, COMPLETIONS, body, patience=SOON)
        ends = Counter(how(reply) for reply in await asyncio.gather(*asked))
        assert (bad.status, bad.code) == (500, "engine_error")
        assert ends["lost"] == ends["answered"] == 0 and ends.total() == SEATS - 1
        assert b"The device is gone" not in bad.body, "a client learns nothing of the inside"
        assert await status(served, "/health/ready") == 200
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 9, "temperature": 0}
        assert (await ask(served.port, COMPLETIONS, body, patience=SOON)).text == letters_after("Hi", 9)
        served.process.terminate()
        assert served.exit_code() == 0 and "The device is gone." in served.complaints


async def test_a_step_that_hangs_is_unready_and_then_an_exit() -> None:
    """Clients are cut off: nothing is there that could still answer them."""
    with fake_serving(Options({"watchdog": 1.0}, seqs=SEATS, watchdog_s=1.0)) as served:
        asked = begin(served, SEATS - 1, ENDLESS)
        await until(served, SEATS - 1, 0)
        body = {"model": MODEL, "prompt": HANGING, "max_tokens": 5}
        hanging = asyncio.create_task(ask(served.port, COMPLETIONS, body, patience=SOON))
        ready: Counter[int | None] = Counter()
        while (found := await status(served, "/health/ready")) is not None:
            ready[found] += 1
        await asyncio.gather(*asked, hanging)
        assert await asyncio.to_thread(served.exit_code) == WATCHDOG_EXIT
        assert served.complaints.startswith("The model does not come back from a step")
    assert set(ready) == {200, 503} and ready[503] > 1


def test_unready_comes_before_the_watchdog() -> None:
    for watchdog, unready in ((0.0, 120.0), (600.0, 120.0), (60.0, 30.0)):
        given = read({"watchdog": watchdog}).configuration
        assert server_settings(given).wedge_after_s == unready
