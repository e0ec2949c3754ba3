"""Out of file descriptors: the server says so once, and serves again when some are free."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

from chairlift.server.descriptors import ENOUGH, EXHAUSTED, Complaints, raise_limit
from tests.server.test_serve import PATIENCE, ROOT

LIMIT = 48
SERVE = f"ulimit -n {LIMIT} && exec {sys.executable} -m tests.server.fake_serve 0 0 short"


def test_more_connections_than_descriptors() -> None:
    with (
        subprocess.Popen(
            ["sh", "-c", SERVE],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        ExitStack() as connections,
    ):
        assert process.stdout is not None and process.stderr is not None
        try:
            url = process.stdout.readline().strip()
            address = ("127.0.0.1", httpx.URL(url).port)
            for _ in range(LIMIT + 10):
                connections.enter_context(socket.create_connection(address, PATIENCE))
            assert "No file descriptor is left" in process.stderr.readline()
            connections.close()
            assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=PATIENCE)
            assert (process.returncode, rest) == (0, "")
        finally:
            process.kill()


async def test_it_says_so_once_a_minute_and_passes_on_the_rest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, handler = asyncio.get_running_loop(), Complaints()
    for seconds in (0.0, 0.1, 59.0, 61.0):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda seconds=seconds: seconds)
            handler(loop, {"message": EXHAUSTED})
    assert len(caplog.records) == 2
    handler(loop, {"message": "something else"})
    assert caplog.records[-1].getMessage() == "something else"


def test_the_limit_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    for has in ((256, 1024), (256, resource.RLIM_INFINITY), (2 * ENOUGH, 4 * ENOUGH), (1024, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, has=has: has)
        raise_limit()
    assert asked == [(1024, 1024), (ENOUGH, resource.RLIM_INFINITY)]
