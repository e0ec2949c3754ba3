"""A server that no longer gets on ends itself, and one that works for long does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from chairlift.server.lifecycle import WATCHDOG_EXIT
from chairlift.server.watchdog import Beat, Watchdog
from tests.server.test_serve import BODY, PATIENCE, ROOT, serving


@pytest.mark.parametrize(
    ("beat", "now", "silence"),
    [
        (Beat(100.0, 0.0), 104.0, 4.0),  # between steps: only the loop may hang
        (Beat(100.0, 30.0), 104.0, 34.0),  # the step began at 70
        (Beat(100.0, 30.0), 100.0, 30.0),
    ],
)
def test_how_long_nothing_has_moved(beat: Beat, now: float, silence: float) -> None:
    assert beat.silence_s(now) == silence


class Watched:
    """A watchdog with a limit of 10 s over a clock of its own; beats and looks are ours to make."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_began: float | None = None
        self.ends: list[str] = []
        self.well = 0
        self.dog = Watchdog(
            lambda: 0.0 if self.step_began is None else self.now - self.step_began,
            10.0,
            self.ends.append,
            looked=self.see,
            clock=lambda: self.now,
        )

    def see(self) -> None:
        self.well += 1

    def beat(self) -> None:
        self.dog._take_beat()

    def look_until(self, now: float) -> None:
        """As often as the thread does."""
        while self.now < now:
            self.now = min(now, self.now + self.dog.every_s)
            self.dog.look()


def test_a_step_that_does_not_come_back() -> None:
    watched = Watched()
    watched.step_began = 0.0
    for watched.now in (0.0, 4.0, 8.0):
        watched.beat()
        watched.dog.look()
    assert (watched.well, watched.ends) == (3, [])
    watched.now = 10.5  # 2.5 s after the beat, 10.5 s into the step
    watched.dog.look()
    (line,) = watched.ends
    assert "does not come back from a step" in line and "10 seconds" in line
    assert watched.well == 3


def test_an_event_loop_that_hangs() -> None:
    watched = Watched()
    watched.look_until(10.0)
    assert watched.ends == []
    watched.look_until(10.1)
    assert "event loop hangs" in watched.ends[0]


def test_an_event_loop_that_hangs_beside_a_step() -> None:
    watched = Watched()
    watched.now, watched.step_began = 1.0, 0.9
    watched.beat()
    watched.look_until(11.0)
    assert "event loop hangs" in watched.ends[0]


@pytest.mark.parametrize("step", [False, True])
def test_a_process_that_stood_still_has_its_time_from_then_on(step: bool) -> None:
    watched = Watched()
    watched.look_until(5.0)
    watched.step_began = watched.now if step else None
    watched.beat()
    watched.now = 1000.0  # Ctrl-Z, and fg: its threads look and beat in any order
    watched.dog.look()
    if step:
        watched.beat()
    watched.look_until(1010.0)
    assert watched.ends == []
    watched.look_until(1010.1)
    assert "nothing has moved for 10 seconds" in watched.ends[0]


def test_many_long_steps_are_no_fault() -> None:
    """A prompt that takes minutes, of steps that each take less than the limit."""
    watched = Watched()
    for step in range(100):
        watched.step_began = 9.0 * step
        for within in (0.0, 3.0, 6.0, 8.9):
            watched.now = watched.step_began + within
            watched.beat()
            watched.dog.look()
    assert watched.now > 890 and watched.ends == []


def test_it_looks_several_times_within_the_limit_and_often_enough_for_the_supervisor() -> None:
    assert Watchdog(lambda: 0.0, 8.0, lambda line: None).every_s == 1.0
    assert Watchdog(lambda: 0.0, 6000.0, lambda line: None).every_s == 15.0
    assert Watchdog(lambda: 0.0, float("inf"), lambda line: None, every_s=3.0).every_s == 3.0


async def test_after_stop_nothing_looks() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    dog = Watchdog(lambda: 1e9, 0.08, lambda line: loop.call_soon_threadsafe(ended.set), every_s=0.01)
    dog.start()
    await asyncio.wait_for(ended.wait(), 20)
    dog.stop()


def test_a_wedged_process_leaves_with_a_code_and_the_stacks_of_its_threads() -> None:
    with serving(10, "wedge", "2") as process:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{process.url}/v1/chat/completions", json=BODY, timeout=20)
        code, err = process.end()
    assert code == WATCHDOG_EXIT == 70
    first, *stacks = err.splitlines()
    assert first.startswith("The model does not come back from a step: nothing has moved for")
    assert any("tests/server/fake_serve.py" in line and "in step" in line for line in stacks)


def test_a_process_that_was_stopped_for_longer_than_its_watchdog_waits_goes_on() -> None:
    with serving(10, "short", "2") as process:
        process.signal(signal.SIGSTOP)
        time.sleep(2.5)  # which is for how long it stands still
        process.signal(signal.SIGCONT)
        assert httpx.post(f"{process.url}/v1/chat/completions", json=BODY).status_code == 200
        process.signal()
        assert process.end() == (0, "")


def test_a_process_whose_loop_hangs_leaves_with_a_code() -> None:
    with serving(10, "deaf", "2") as process:
        code, err = process.end()
    assert code == WATCHDOG_EXIT
    assert err.startswith("The event loop hangs: ")


def test_a_process_whose_last_words_nobody_reads_ends_all_the_same() -> None:
    """Its standard error is a pipe that is full, so that every write waits."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", "tests.server.fake_serve", "0", "10", "deaf", "1"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, stderr=writing
    ) as process:
        os.close(writing)
        try:
            assert process.wait(PATIENCE) == -signal.SIGALRM
        finally:
            process.kill()
            os.close(reading)
