"""What an operator does with a service, over a supervisor that is none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.operations import (
    Service,
    install,
    make_folders,
    restart,
    start,
    stop,
    uninstall,
    write,
)
from chairlift.server.service.places import person
from chairlift.server.service.readiness import Waited
from chairlift.server.service.record import Record, Run
from chairlift.server.service.supervisor import Seen
from tests.server.service.definitions import definition
from tests.server.service.test_status import Fake, service

READY = Waited(url="http://127.0.0.1:1")
DOWN, UP, ABSENT = Seen(True), Seen(True, 7), Seen(False)


def wait(service: Service, since: float) -> Waited:
    return READY


def calls(found: Service) -> list[str]:
    assert isinstance(found.supervisor, Fake)
    return found.supervisor.calls


def test_it_is_written_and_loaded(tmp_path: Path) -> None:
    found = service(tmp_path, ABSENT)
    assert install(found, definition(folders=(tmp_path / "a" / "b",)), wait) == READY
    assert calls(found) == ["load"]
    assert found.supervisor.file.read_text() == "chairlift\n"
    assert found.supervisor.file.stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_one_that_runs_is_stopped_first(tmp_path: Path) -> None:
    found = service(tmp_path, UP)
    install(found, definition(), wait)
    assert calls(found) == ["stop", "load"]


class Refusing(Fake):
    def load(self) -> None:
        super().load()
        raise ServiceFault("No.")


def test_of_one_that_is_refused_nothing_is_left(tmp_path: Path) -> None:
    found = replace(service(tmp_path, ABSENT), supervisor=Refusing(tmp_path / "it.plist", ABSENT))
    with pytest.raises(ServiceFault, match="No"):
        install(found, definition(), wait)
    assert calls(found) == ["load", "reread"] and not found.supervisor.file.exists()
    found.supervisor.file.write_text("earlier")
    with pytest.raises(ServiceFault, match="No"):
        install(found, definition(), wait)
    assert found.supervisor.file.exists()


def test_it_is_removed(tmp_path: Path) -> None:
    found = service(tmp_path, UP, Record(failures=3))
    found.supervisor.file.touch()
    uninstall(found)
    assert calls(found) == ["forget", "reread"] and not found.supervisor.file.exists()
    assert found.record.read() == Record()


def test_started_stopped_and_started_again(tmp_path: Path) -> None:
    found = service(tmp_path, DOWN)
    found.supervisor.file.touch()
    assert start(found, wait) == READY
    stop(found)
    assert restart(found, wait) == READY
    assert calls(found) == ["start", "stop", "stop", "start"]


def test_one_that_runs_is_not_started_but_waited_for(tmp_path: Path) -> None:
    found = service(tmp_path, UP, Record(run=Run(7, 55.0)))
    found.supervisor.file.touch()
    seen: list[float] = []

    def keep(service: Service, since: float) -> Waited:
        seen.append(since)
        return READY

    assert start(found, keep) == READY
    assert calls(found) == [] and seen == [55.0]


def test_what_is_not_there(tmp_path: Path) -> None:
    found = service(tmp_path, ABSENT)
    for act in (uninstall, stop, lambda found: start(found, wait), lambda found: restart(found, wait)):
        with pytest.raises(ServiceFault, match="There is no such service"):
            act(found)
    assert calls(found) == []


def test_the_systems_are_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(service(tmp_path, UP), system=True)
    found.supervisor.file.touch()
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    for act in (uninstall, stop, lambda found: install(found, definition(), wait)):
        with pytest.raises(ServiceFault, match="sudo"):
            act(found)
    assert calls(found) == []


def test_folders_belong_to_who_will_write_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: dict[Path, tuple[int, int]] = {}
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: owners.update({path: (uid, gid)}))
    make_folders((tmp_path / "a" / "b", tmp_path), replace(person(), uid=5, gid=6))
    assert owners == {tmp_path / "a": (5, 6), tmp_path / "a" / "b": (5, 6)}


def test_what_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceFault, match="cannot be written"):
        write(tmp_path / "file" / "x", "")
    with pytest.raises(ServiceFault, match="cannot be made"):
        make_folders((tmp_path / "file" / "x",), None)
