"""Before a server listens."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from chairlift.server.security.keys import KeyFault, KeySources
from chairlift.server.security.opening import Exposed, allowed_hosts, open_safely
from chairlift.server.security.settings import SecuritySettings
from chairlift.server.security.tls import TLSFault, TLSSettings
from chairlift.server.serve import run_server
from chairlift.server.served import ServeOptions
from chairlift.server.settings import ServerSettings
from tests.server.security.keyring import SOURCES

KEYED = SecuritySettings(keys=SOURCES)


def resolve(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> None:
    def getaddrinfo(host: str, port: int, **asked: object) -> list[tuple[object, ...]]:
        addresses = names.get(host, [host])
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "studio"])
def test_others_need_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, studio=["127.0.1.1", "192.168.1.5"])
    with pytest.raises(Exposed, match="--insecure"):
        open_safely(host, 0, SecuritySettings())
    assert open_safely(host, 0, KEYED) == KEYED
    insecure = SecuritySettings(insecure=True)
    assert open_safely(host, 0, insecure) == insecure


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.1.2.3", "localhost"])
def test_here_nobody_needs_one_but_names_are_looked_at(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, localhost=["127.0.0.1", "::1"])
    assert open_safely(host, 0, SecuritySettings()).allowed_hosts == ()
    assert open_safely(host, 0, KEYED).allowed_hosts is None


def test_names_that_were_asked_for_are_kept() -> None:
    for local in (True, False):
        assert allowed_hosts(("a.example",), local) == ("a.example",)


def test_faults_come_before_the_server(tmp_path: Path) -> None:
    with pytest.raises(KeyFault):
        open_safely("127.0.0.1", 0, SecuritySettings(keys=KeySources(api_key_files=(tmp_path / "no",))))
    with pytest.raises(TLSFault):
        open_safely("127.0.0.1", 0, SecuritySettings(tls=TLSSettings(tmp_path / "no")))


@pytest.mark.parametrize(
    ("host", "security", "said"),
    [
        ("0.0.0.0", SecuritySettings(), "0.0.0.0"),
        ("127.0.0.1", SecuritySettings(keys=KeySources(api_keys=("x",))), "at least 8 characters"),
        ("127.0.0.1", SecuritySettings(tls=TLSSettings(Path("/none.pem"))), "/none.pem"),
    ],
)
def test_each_is_one_line_and_1(host: str, security: SecuritySettings, said: str) -> None:
    lines: list[str] = []
    options = ServeOptions(host=host, port=0, settings=ServerSettings(security=security))
    assert run_server(options, lambda serving: None, lines.append) == 1
    assert len(lines) == 1 and "\n" not in lines[0] and said in lines[0]


def test_that_keys_travel_in_the_clear_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chairlift.server"):
        open_safely("127.0.0.1", 0, KEYED)
        assert caplog.text == ""
        open_safely("0.0.0.0", 0, KEYED)
    assert "unencrypted" in caplog.text
