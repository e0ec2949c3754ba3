"""Many idle connections and clients that do not read: `python -m tests.faults.crowd` in small."""

from __future__ import annotations

import pytest

from tests.faults.crowd import FEW_FILES, room_for, see_idle, see_slow
from tests.faults.fake_server import Options, fake_serving

IDLE, SLOW = 2000, 20
CONNECTION = 64 * 1024
"""Bytes that an idle connection may cost at most."""
READER = 4 * 2**20
"""Bytes of one that does not read: the server's buffer, and what an answer holds until it is cut."""


async def test_idle_connections_and_clients_that_do_not_read() -> None:
    if not room_for(IDLE):
        pytest.skip("this system does not allow so many open files")
    limits = {"header_timeout": 3, "keep_alive_timeout": 3, "send_timeout": 1}
    with fake_serving(Options(limits, seqs=SLOW + 8), *FEW_FILES) as served:
        seen = await see_idle(served, IDLE)
        assert seen.ended == IDLE
        assert seen.during - seen.before < IDLE * CONNECTION
        seen = await see_slow(served, SLOW)
        assert seen.ended == SLOW
        assert seen.during - seen.before < SLOW * READER
        served.process.terminate()
        assert (served.exit_code(), served.complaints) == (0, "")
