"""Who listens on a port."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from chairlift.server import occupant as module
from chairlift.server.occupant import answers_as_chairlift, occupant


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_found_by_its_socket(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "answers_as_chairlift", lambda port: False)
    name = Path("/proc/self/comm").read_text().strip()
    assert occupant(listener.getsockname()[1]) == f"{name}, pid {os.getpid()}"


def test_lsof_is_asked_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lsof = tmp_path / "lsof"
    lsof.write_text('#!/bin/sh\n[ "$2" = -iTCP:8000 ] && printf "p123\\ncnginx\\nf6\\n"\n')
    lsof.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert module._by_lsof(8000) == "nginx, pid 123"
    assert module._by_lsof(8001) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert module._by_lsof(8000) is None


def test_nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("_by_proc", "_by_lsof"):
        monkeypatch.setattr(module, way, lambda port: None)
    monkeypatch.setattr(module, "answers_as_chairlift", lambda port: False)
    assert occupant(1) == "another process"
    monkeypatch.setattr(module, "answers_as_chairlift", lambda port: True)
    assert occupant(1) == "a Chairlift server"


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b'{"status": "ready"}', True), (b'{"status": "UP"}', False), (b"[]", False), (b"ok", False)],
)
def test_what_answers_as_this_server_does(body: bytes, expected: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert answers_as_chairlift(server.server_address[1]) is expected
        thread.join()
