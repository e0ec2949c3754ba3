"""Keys change while the server runs."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import httpx
import pytest

from chairlift.server.security.keys import Keys, KeySources
from chairlift.server.security.reload import Reload, has_terminal
from tests.server.security.keyring import ALICE, BOB, ROOT, bearer
from tests.server.security.test_keys import key_file
from tests.server.test_serve import PATIENCE, serving
from tests.server.test_serve import ROOT as FOLDER


def reload_of(sources: KeySources, hung_up: list[bool], terminal: list[bool]) -> tuple[Keys, Reload]:
    keys = Keys(sources.read())
    it = Reload(keys, sources, hang_up=lambda: hung_up.append(True), terminal=lambda: terminal[0])
    return keys, it


def test_what_the_file_says_now_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, f"alice: {ALICE}")
    keys, again = reload_of(KeySources(api_key_files=(path,), api_keys=(ROOT,)), [], [False])
    key_file(tmp_path, f"alice: {BOB}")
    with caplog.at_level(logging.WARNING):
        again()
    assert keys.find(ALICE.encode()) is None
    assert keys.find(BOB.encode()) is not None and keys.find(ROOT.encode()) is not None
    assert "key-1, alice" in caplog.text and BOB not in caplog.text


@pytest.mark.parametrize("text", ["", "not a key", "alice: short"])
def test_what_cannot_be_read_changes_nothing(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, ALICE)
    keys, again = reload_of(KeySources(api_key_files=(path,)), [], [False])
    key_file(tmp_path, text)
    again()
    assert keys.find(ALICE.encode()) is not None and "stay as they were" in caplog.text
    path.unlink()
    again()
    key_file(tmp_path, BOB, 0o644)
    again()
    assert keys.find(ALICE.encode()) is not None and keys.find(BOB.encode()) is None


def test_the_terminals_end_is_a_signal_to_stop(tmp_path: Path) -> None:
    hung_up: list[bool] = []
    terminal = [True]
    path = key_file(tmp_path, ALICE)
    keys, again = reload_of(KeySources(api_key_files=(path,)), hung_up, terminal)
    key_file(tmp_path, BOB)
    again()
    assert not hung_up and keys.find(BOB.encode()) is not None
    terminal[0] = False
    again()
    assert hung_up == [True]


def test_a_terminal_is_seen_until_it_is_gone() -> None:
    """In a process of its own session, whose terminal's other end is closed."""
    child, end = pty.fork()
    if child == 0:  # pragma: no cover
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        before = has_terminal()
        os.write(1, b"!")
        while has_terminal():
            time.sleep(0.01)
        os._exit(0 if before else 1)
    assert os.read(end, 1) == b"!"
    os.close(end)
    signal.alarm(PATIENCE)
    try:
        assert os.waitpid(child, 0) == (child, 0)
    finally:
        signal.alarm(0)


def test_a_server_reads_its_keys_again(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"alice: {ALICE}")
    with serving(10, "short", CHAIRLIFT_API_KEY_FILE=str(path)) as process:
        models = f"{process.url}/v1/models"
        assert httpx.get(f"{process.url}/health/ready").status_code == 200
        assert [httpx.get(models, headers=bearer(key)).status_code for key in (ALICE, BOB)] == [200, 401]
        key_file(tmp_path, f"alice: {BOB}")
        process.signal(signal.SIGHUP)
        while httpx.get(models, headers=bearer(BOB)).status_code != 200:
            pass
        assert httpx.get(models, headers=bearer(ALICE)).status_code == 401
        process.signal()
        code, err = process.end()
    assert code == 0 and "Keys were read again: alice" in err and BOB not in err


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_stops_a_server_unless_nohup_started_it(
    ignored: bool, tmp_path: Path
) -> None:
    path = key_file(tmp_path, f"alice: {ALICE}")
    ours, terminal = pty.openpty()

    def begin() -> None:  # pragma: no cover
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    search = os.pathsep.join([str(FOLDER), str(FOLDER / "src")])
    with subprocess.Popen(
        [sys.executable, "-m", "tests.server.fake_serve", "0", "10", "short"],
        env={**os.environ, "PYTHONPATH": search, "CHAIRLIFT_API_KEY_FILE": str(path), "LOGGED": "1"},
        cwd=FOLDER,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=begin,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            process.stdout.readline()
            os.close(terminal)
            os.close(ours)
            loaded, told = (json.loads(process.stderr.readline())["message"] for _ in range(2))
            assert loaded.startswith("fake is loaded: ")
            if ignored:
                assert told.startswith("Keys were read again: alice")
                assert httpx.get(f"{url}/v1/models", headers=bearer(ALICE)).status_code == 200
                process.send_signal(signal.SIGTERM)
            else:
                assert told == "SIGHUP: the server stops"
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
