"""kill -9 under load, and another server in its place."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.faults.exchange import ask, exchange, letters_after, request_bytes
from tests.faults.fake_server import MODEL, Options, fake_serving
from tests.faults.test_stop import COMPLETIONS, ENDLESS, RESPONSES, SOON, begin, until

SEATS = 12


async def test_another_takes_its_port_and_what_it_kept(tmp_path: Path) -> None:
    settings = {"responses_store": str(tmp_path / "responses.db")}
    asks = {"model": MODEL, "input": "Hi", "max_output_tokens": 9}
    with fake_serving(Options(settings, seqs=SEATS)) as served:
        kept = (await ask(served.port, RESPONSES, asks, patience=SOON)).json
        going_on = {**asks, "max_output_tokens": ENDLESS, "background": True}
        running = (await ask(served.port, RESPONSES, going_on, patience=SOON)).json
        asked = begin(served, 8, ENDLESS)
        await until(served, 9, 0)
        served.signal(signal.SIGKILL)
        replies = await asyncio.gather(*asked)
        assert served.exit_code() == -signal.SIGKILL
        assert {reply.end for reply in replies} <= {"cut", "unanswered"}, "none seems to be whole"
    with fake_serving(Options(settings, seqs=SEATS, port=served.port)) as again:
        assert again.port == served.port
        found = (await exchange(again.port, request_bytes(f"{RESPONSES}/{kept['id']}", method="GET"))).json
        assert found == kept
        unfinished = await exchange(again.port, request_bytes(f"{RESPONSES}/{running['id']}", method="GET"))
        assert unfinished.json["status"] == "in_progress", "until its server has been silent for a minute"
        follows = {**asks, "previous_response_id": kept["id"]}
        assert (await ask(again.port, RESPONSES, follows, patience=SOON)).json["status"] == "incomplete"
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 9, "temperature": 0}
        assert (await ask(again.port, COMPLETIONS, body, patience=SOON)).text == letters_after("Hi", 9)
        again.process.terminate()
        assert (again.exit_code(), again.complaints) == (0, "")
