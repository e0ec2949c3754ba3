"""`chairlift service` on the command line."""

from __future__ import annotations

import json
import os
import plistlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.server.cli import service as command
from chairlift.server.cli.app import run
from chairlift.server.service.places import Person
from chairlift.server.service.record import RecordFile
from tests.server.service.definitions import Became, Programs

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
PATIENCE = 60
LAUNCHCTL = "/bin/launchctl"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The operator is somebody whose home is empty."""
    monkeypatch.setattr(command, "person", lambda name=None: Person(name or "ada", 501, 20, tmp_path))
    return tmp_path


@pytest.fixture
def programs(monkeypatch: Patch) -> Iterator[Programs]:
    """Stand-ins for the system's."""
    found = Programs()
    monkeypatch.setattr(command, "commands", lambda: found)
    yield found
    found.done()


def on(platform: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("sys.platform", {"launchd": "darwin", "systemd": "linux"}[platform])


@pytest.mark.parametrize("system", [[], ["--system"]])
def test_print_shows_a_plist_and_changes_nothing(
    system: list[str], home: Path, programs: Programs, capsys: Captured
) -> None:
    words = ["service", "install", "--print", "--platform", "launchd", *system, "--", "--port", "9000"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    found = plistlib.loads(out.encode())
    assert found["ProgramArguments"][-4:-2] == ["--port", "9000"]
    assert ("UserName" in found) == bool(system)
    assert list(home.iterdir()) == [] and err == ""


def test_print_shows_a_unit_and_changes_nothing(home: Path, programs: Programs, capsys: Captured) -> None:
    file = home / "lift.toml"
    file.write_text("port = 9000")
    assert run(["service", "install", "--print", "--platform", "systemd", "--config", str(file)]) == 0
    out, _ = capsys.readouterr()
    assert f" -- --config {file}\n" in out and out.startswith("[Unit]\n")
    assert list(home.iterdir()) == [file]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["install", "--", "--port", "70000"], "--port"),
        (["install", "--", "--prot", "1"], "--prot"),
        (["install", "--platform", "launchd"], "--platform"),
        (["install", "--user", "ada"], "--user"),
        (["install", "--env", "A"], "--env"),
        (["install", "--name", "a/b"], "--name"),
        (["install", "--env", "HF_TOKEN=x"], "HF_TOKEN"),
        (["ride"], "ride"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_changes_nothing(
    words: list[str], message: str, home: Path, programs: Programs, capsys: Captured
) -> None:
    assert run(["service", *words]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert list(home.iterdir()) == []


def test_installed_with_launchd(home: Path, programs: Programs, monkeypatch: Patch, capsys: Captured) -> None:
    on("launchd", monkeypatch)
    target = "gui/501/org.chairlift.server"
    file = home / "Library/LaunchAgents/org.chairlift.server.plist"
    programs.expect(LAUNCHCTL, "print", target, code=113)
    programs.expect(LAUNCHCTL, "enable", target)
    programs.expect(LAUNCHCTL, "bootstrap", "gui/501", str(file))
    assert run(["service", "install", "--wait", "0", "--", "--port", "9000"]) == 0
    assert capsys.readouterr().out == f"The service chairlift is started (launchd, {file}).\n"
    found = plistlib.loads(file.read_bytes())
    for key in ("WorkingDirectory", "StandardErrorPath"):
        folder = Path(found[key]) if key == "WorkingDirectory" else Path(found[key]).parent
        assert folder.is_dir() and folder.is_relative_to(home)


def test_removed_with_systemd(home: Path, programs: Programs, monkeypatch: Patch, capsys: Captured) -> None:
    on("systemd", monkeypatch)
    file = home / ".config/systemd/user/chairlift-small.service"
    file.parent.mkdir(parents=True)
    file.touch()
    manager = ("systemctl", "--user")
    shown = "LoadState=loaded\n"
    programs.expect(*manager, "show", "chairlift-small.service", f"--property={SHOWN}", out=shown)
    programs.expect(*manager, "disable", "--now", "chairlift-small.service")
    programs.expect(*manager, "reset-failed", "chairlift-small.service")
    programs.expect(*manager, "daemon-reload")
    assert run(["service", "uninstall", "--name", "small"]) == 0
    assert not file.exists() and str(file) in capsys.readouterr().out


SHOWN = (
    "LoadState,ActiveState,SubState,MainPID,ExecMainCode,ExecMainStatus,ExecMainExitTimestampMonotonic,"
    "Result,NRestarts"
)


def test_status(home: Path, programs: Programs, monkeypatch: Patch, capsys: Captured) -> None:
    on("systemd", monkeypatch)
    show = ("systemctl", "--user", "show", "chairlift.service", f"--property={SHOWN}")
    for _ in range(2):
        programs.expect(*show, out="LoadState=not-found\nActiveState=inactive\nMainPID=0\n")
    assert run(["service", "status"]) == 4
    assert "state     not installed\n" in capsys.readouterr().out
    assert run(["service", "status", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["state"] == "not installed"


def test_logs_of_launchds(home: Path, programs: Programs, monkeypatch: Patch, capsys: Captured) -> None:
    on("launchd", monkeypatch)
    assert run(["service", "logs"]) == 1
    assert "There is no log yet" in capsys.readouterr().err
    log = home / "Library/Logs/chairlift/chairlift.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthree\n")
    assert run(["service", "logs", "-n", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree\n"
    programs.expect("tail", "-n", "2", "-F", str(log))
    monkeypatch.setattr(Programs, "become", lambda self, words: self.run(words))
    assert run(["service", "logs", "-n", "2", "-f"]) == 0


def test_logs_of_systemds(programs: Programs, monkeypatch: Patch) -> None:
    on("systemd", monkeypatch)
    programs.expect("journalctl", "--user-unit", "chairlift.service", "--lines", "100", "--no-pager")
    monkeypatch.setattr("chairlift.server.cli.app.complain", lambda line: None)
    with pytest.raises(Became):
        command.logs()


def test_a_system_without_either(monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    assert run(["service", "status"]) == 1
    assert "launchd or systemd" in capsys.readouterr().err


def service_process(record: Path, *words: str) -> subprocess.Popen[str]:
    """What the supervisor runs."""
    program = [sys.executable, "-P", "-m", "chairlift", "service", "run", "--record", str(record)]
    return subprocess.Popen(
        [*program, "--gave-up-exit", "78", "--", "--config", "/dev/null", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CHAIRLIFT_CACHE": str(record.parent / "cache")},
    )


def test_a_port_that_is_taken_is_noted_and_given_up(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = service_process(record, "--port", port)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and err.count("\n") == 1 and "in use" in err
    noted = RecordFile(record).read()
    assert noted.failures == 1 and noted.run is not None and noted.run.ended is not None
    assert noted.run.ended.code == 1 and f"127.0.0.1:{port}" in noted.run.ended.reason


def test_flags_that_went_bad_are_given_up_at_once(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    process = service_process(record, "--chat-template", str(tmp_path / "gone"))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 78
    assert "--chat-template" in err and "Given up: 1 start failed" in err
    assert RecordFile(record).read().gave_up is not None


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_stop_while_it_starts_is_no_fault(number: signal.Signals, tmp_path: Path) -> None:
    fifo = tmp_path / "template"
    os.mkfifo(fifo)
    record = tmp_path / "record.json"
    process = service_process(record, "--config", str(fifo))
    with fifo.open("w"):  # opens once the process reads it: its handler is there
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    noted = RecordFile(record).read()
    assert noted.run is not None and noted.run.ended is not None and noted.run.ended.code == 0
