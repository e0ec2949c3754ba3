"""One server for all tests of this folder: loading a real model is paid once."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.served.process import PATIENCE, Served, serving

SEATS, QUEUE, CHUNK = 8, 16, 64
"""Requests at once and waiting, and tokens a step: small, so that these tests reach the bounds."""


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Ended by SIGTERM at the end, which must find it idle, silent and content."""
    bounds = ("--max-num-seqs", SEATS, "--max-waiting", QUEUE, "--max-num-batched-tokens", CHUNK)
    with serving(*map(str, bounds)) as server:
        yield server
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert server.complaints == ""


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE, limits=limits) as client:
        yield client
