"""What a newcomer and an operator see of a server with the real model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.served.conftest import CHUNK
from tests.served.process import MODEL, PATIENCE, Served
from tests.served.talk import chunks, complete, idle

pytestmark = pytest.mark.slow

PARIS = "The capital of France is Paris."
IDLE_SECONDS = 5.0
IDLE_SHARE = 0.01
"""Of a core, at most, while nobody asks for anything."""


def test_it_says_what_it_serves_and_the_curl_line_gets_paris(served: Served) -> None:
    first, *_, curl = served.announced.splitlines()
    assert MODEL in first and f"{served.url}/v1" in first
    assert answer_of(curl) == PARIS


def test_the_readmes_curl_gets_paris(served: Served) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^ {4}curl .*?^ {4}}'$", readme, re.MULTILINE | re.DOTALL)
    assert found
    command = found[0].replace("http://127.0.0.1:8000", served.url)
    assert served.url in command
    assert answer_of(command) == PARIS


def answer_of(curl: str) -> str:
    """What a shell gets for such a line."""
    said = subprocess.run(curl, shell=True, check=True, capture_output=True, text=True, timeout=PATIENCE)
    (choice,) = json.loads(said.stdout)["choices"]
    return str(choice["message"]["content"])


async def test_a_long_prompt_does_not_stop_a_running_answer(
    served: Served, client: httpx.AsyncClient
) -> None:
    """Between a long request's start and its first token, the stream beside it gets a token every step."""
    await idle(client)
    received = 0
    streaming, begun = asyncio.Event(), asyncio.Event()
    short = complete("Once", max_tokens=4000, ignore_eos=True, stream=True, logprobs=0)
    long = complete([504] * 1500, max_tokens=1, stream=True)

    async def run_beside() -> None:
        nonlocal received
        async with client.stream("POST", short.path, json=short.body) as response:
            async for chunk in chunks(response):
                (choice,) = chunk["choices"]
                received += len(choice["logprobs"]["tokens"])
                streaming.set()
                if begun.is_set():
                    return

    beside = asyncio.create_task(run_beside())
    await streaming.wait()
    before = received
    async with client.stream("POST", long.path, json=long.body) as response:
        await anext(aiter(chunks(response)))
        between = received - before
    begun.set()
    await beside
    assert between >= 1500 // CHUNK - 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_idle_it_uses_next_to_nothing(served: Served, client: httpx.AsyncClient) -> None:
    """A resource, not a time to answer: the process' own CPU time over a few seconds of nothing to do."""
    await idle(client)
    await client.aclose()
    before, start = cpu_seconds(served.process.pid), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    used = cpu_seconds(served.process.pid) - before
    assert used < IDLE_SHARE * (time.monotonic() - start)


def cpu_seconds(pid: int) -> float:
    """User and system time of all of a process' threads (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
