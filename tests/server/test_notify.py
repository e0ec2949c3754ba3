"""What systemd is told: sd_notify(3)."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.server.notify import Notifier
from tests.server.test_serve import PATIENCE, serving

ADDRESSES = [
    "path",
    pytest.param("@abstract", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux")),
]


class Manager:
    """The receiving end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)

    def heard(self) -> list[str]:
        """The next message's lines."""
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=ADDRESSES)
def manager(request: pytest.FixtureRequest) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory() as folder:  # short: such an address has 107 bytes at most
        abstract = f"@chairlift-test-{secrets.token_hex(4)}"
        heard = Manager(abstract if request.param == "@abstract" else str(Path(folder) / "notify"))
        yield heard
        heard.socket.close()


def test_each_message(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address})
    notifier.status("Loading")
    notifier.ready("Serving a\nb")
    notifier.alive()
    notifier.stopping()
    assert manager.heard() == ["STATUS=Loading"]
    assert manager.heard() == ["READY=1", "STATUS=Serving a b"]
    assert manager.heard() == ["WATCHDOG=1"]
    assert manager.heard() == ["STOPPING=1", "STATUS=Running answers finish."]


def test_nobody_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({}).ready("Serving")
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("Serving")
    assert "systemd cannot be told READY=1" in caplog.text


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_how_often_systemd_wants_to_hear(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/run/x", **environ}).watchdog_s == seconds
    assert Notifier(environ).watchdog_s is None


def test_a_server_tells_its_life(manager: Manager) -> None:
    told = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "300000"}
    with serving(10, "short", **told) as process:
        assert manager.heard() == [f"STATUS=Loading; {process.url}"]
        assert manager.heard() == ["READY=1", "STATUS=Serving fake"]
        assert manager.heard() == ["WATCHDOG=1"]
        assert manager.heard() == ["WATCHDOG=1"]
        process.signal()
        heard = [manager.heard()]
        while heard[-1] == ["WATCHDOG=1"]:
            heard.append(manager.heard())
        assert heard[-1] == ["STOPPING=1", "STATUS=Running answers finish."]
        assert process.end() == (0, "")
