"""How a service is doing, and whether it comes up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest

from chairlift.server.service.definition import ServiceDefinition
from chairlift.server.service.operations import Service
from chairlift.server.service.places import Places
from chairlift.server.service.readiness import BIRTH_S, Waited, await_ready
from chairlift.server.service.record import Ended, Record, Run
from chairlift.server.service.status import Status, duration, lines, status
from chairlift.server.service.supervisor import Seen

URL = "http://127.0.0.1:1"
UP = Run(7, 100.0, URL, ("a", "b"), 130.0)
WEDGED = Run(6, 10.0, URL, ("a",), 20.0, True, Ended(90.0, 70, "The model does not come back."))
KILLED = Run(6, 10.0, URL, ("a",), 20.0, True, Ended(90.0, None, ""))


class Fake:
    name = "launchd"

    def __init__(self, file: Path, *seen: Seen) -> None:
        self.file = file
        self._seen = list(seen)
        self.calls: list[str] = []

    def seen(self) -> Seen:
        return self._seen.pop(0) if len(self._seen) > 1 else self._seen[0]

    def text(self, service: ServiceDefinition) -> str:
        return f"{service.name}\n"

    def loaded(self) -> bool:
        return self.seen().installed

    def load(self) -> None:
        self.calls.append("load")

    def forget(self) -> None:
        self.calls.append("forget")

    def reread(self) -> None:
        self.calls.append("reread")

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def logs(self, lines: int, *, follow: bool) -> NoReturn | None:
        return None


def service(folder: Path, seen: Seen, record: Record | None = None) -> Service:
    places = Places(folder, folder / "state", folder / "cache", folder / "hub", folder / "logs")
    found = Service("chairlift", Fake(folder / "it.plist", seen), places, False, None)
    if record is not None:
        found.record.write(record)
    return found


def asked(folder: Path, seen: Seen, record: Record | None = None, health: str | None = "ready") -> Status:
    return status(service(folder, seen, record), 1000.0, lambda url: health)


@pytest.mark.parametrize(
    ("health", "state", "code"),
    [("ready", "ready", 0), ("loading", "loading", 1), ("stalled", "stalled", 1), (None, "silent", 1)],
)
def test_one_that_runs(health: str | None, state: str, code: int, tmp_path: Path) -> None:
    found = asked(tmp_path, Seen(True, 7, "running", starts=2), Record(run=UP, previous=WEDGED), health)
    assert (found.state, found.code, found.pid, found.uptime_s) == (state, code, 7, 900.0)
    assert (found.url, found.models, found.starts) == (URL, ("a", "b"), 2)
    assert found.last_exit is not None and found.last_exit.startswith(
        "exit code 70: the watchdog ended it: a step of the model did not come back "
        "(The model does not come back.)"
    )


def test_one_that_has_just_been_started_and_noted_nothing(tmp_path: Path) -> None:
    found = asked(tmp_path, Seen(True, 8, "running"), Record(run=WEDGED))
    assert (found.state, found.code, found.pid, found.url, found.uptime_s) == ("starting", 1, 8, None, None)


def test_one_that_is_stopped(tmp_path: Path) -> None:
    ended = Run(7, 100.0, URL, ("a",), 130.0, True, Ended(900.0, 0, ""))
    found = asked(tmp_path, Seen(True, None, "not running"), Record(run=ended))
    assert (found.state, found.code, found.pid) == ("stopped", 3, None)
    assert found.last_exit is not None and found.last_exit.startswith("exit code 0: it was asked to stop, ")


def test_one_that_will_be_started_again(tmp_path: Path) -> None:
    killed = Run(7, 100.0, URL, ("a",), 130.0)
    found = asked(tmp_path, Seen(True, None, "spawn scheduled", restarting=True), Record(run=killed))
    assert (found.state, found.code) == ("restarting", 3)
    assert found.last_exit == "killed, or the machine went down"


def test_one_that_gave_up(tmp_path: Path) -> None:
    ended = Run(7, 100.0, None, (), None, False, Ended(101.0, 1, "The port is taken."))
    record = Record(failures=5, gave_up="5 starts in a row failed", run=ended)
    found = asked(tmp_path, Seen(True, None, "not running"), record)
    assert (found.state, found.code, found.failures) == ("gave up", 3, 5)
    shown = dict(lines(found))
    assert shown["state"] == "gave up: 5 starts in a row failed"
    assert shown["last exit"].startswith("exit code 1: a fault; the log says which (The port is taken.), ")


def test_a_kill_is_explained_by_the_supervisor_where_it_knows(tmp_path: Path) -> None:
    told = "killed by SIGKILL: out of memory, or it took longer to stop than it may"
    running = Run(7, 100.0, URL, ("a",), 130.0)
    down = asked(tmp_path, Seen(True, None, "", last_exit=told), Record(run=running))
    assert down.last_exit == told
    again = asked(tmp_path, Seen(True, 7, "running", last_exit=told), Record(run=UP, previous=KILLED))
    assert again.last_exit is not None and again.last_exit.startswith(told)
    untold = asked(tmp_path, Seen(True, 7, "running"), Record(run=UP, previous=KILLED))
    assert untold.last_exit is not None
    assert untold.last_exit.startswith("killed, or the machine went down, ")


def test_one_that_is_not_installed(tmp_path: Path) -> None:
    found = asked(tmp_path, Seen(False))
    assert (found.state, found.code) == ("not installed", 4)
    (tmp_path / "it.plist").touch()
    assert (found := asked(tmp_path, Seen(False))).state == "stopped" and found.code == 3


def test_as_json_and_as_lines(tmp_path: Path) -> None:
    found = asked(tmp_path, Seen(True, 7, "running"), Record(run=UP))
    told = json.loads(json.dumps(found.as_json()))
    assert told["state"] == "ready" and told["models"] == ["a", "b"] and told["last_exit"] is None
    assert lines(found) == [
        ("service", f"chairlift (launchd, {tmp_path / 'it.plist'})"),
        ("state", "ready"),
        ("pid", "7"),
        ("up", "15 min"),
        ("url", URL),
        ("models", "a, b"),
        ("log", str(tmp_path / "logs" / "chairlift.log")),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h"), (86401, "1 d 1 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Time:
    """Passes by pausing; at some pauses something happens."""

    def __init__(self, service: Service, **happens: Record) -> None:
        self.now = 100.0
        self._service = service
        self._happens = {float(at.removeprefix("at_")): record for at, record in happens.items()}

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self._happens if at <= self.now]:
            self._service.record.write(self._happens.pop(at))


def waited(service: Service, time: Time, health: str | None = "ready", bound_s: float = 60.0) -> Waited:
    return await_ready(
        service.supervisor,
        service.record,
        since=100.0,
        bound_s=bound_s,
        ask=lambda url: health,
        clock=time,
        pause=time.pause,
    )


def test_it_waits_until_it_answers(tmp_path: Path) -> None:
    found = service(tmp_path, Seen(True, 7), Record(run=WEDGED))  # an earlier run's end means nothing
    loading = Record(run=Run(7, 101.0, URL))
    ready = Record(run=Run(7, 101.0, URL, ("a",), 130.0))
    time = Time(found, at_101=loading, at_130=ready)
    assert waited(found, time) == Waited(url=URL)
    assert time.now == 130.0


def test_it_says_why_it_ended(tmp_path: Path) -> None:
    found = service(tmp_path, Seen(True, None))
    ended = Run(7, 101.0, None, (), None, False, Ended(102.0, 1, "The port is taken."))
    assert waited(found, Time(found, at_102=Record(failures=1, run=ended))).why == "The port is taken."
    found = service(tmp_path / "second", Seen(True, None))
    gave_up = Record(failures=1, gave_up="1 start failed", run=ended)
    assert waited(found, Time(found, at_102=gave_up)).why == "It gave up: 1 start failed."
    found = service(tmp_path / "third", Seen(True, None))
    killed = Record(run=Run(7, 101.0, None, (), None, False, Ended(102.0, None, "")))
    assert waited(found, Time(found, at_102=killed)).why == "It ended: it was killed."


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    found = service(tmp_path, Seen(True, 7), Record(run=Run(7, 101.0, URL)))
    time = Time(found)
    assert waited(found, time, "loading") == Waited(
        why="It is not ready after 60 s; it still loads.", loading=True
    )
    assert 160 < time.now < 162


def test_a_program_that_cannot_be_run_notes_nothing(tmp_path: Path) -> None:
    found = service(tmp_path, Seen(True, None, "spawn scheduled", last_exit="exit code 78: it is not there"))
    time = Time(found)
    assert waited(found, time).why == "It does not start: exit code 78: it is not there."
    assert time.now == pytest.approx(100 + BIRTH_S, abs=1)
