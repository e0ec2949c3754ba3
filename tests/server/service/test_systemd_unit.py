"""The unit file: systemd's own verdict on it, and what a GPU needs left open."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.server.service.definition import Credential, ServiceDefinition
from chairlift.server.service.systemd_unit import unit, unit_name
from tests.server.service.definitions import definition

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(
    ANALYZE is None, reason="systemd-analyze (Debian: systemd) is not installed"
)
PYTHON = sys.executable
MOST_EXPOSURE = 2.5
"""Of a system unit, by systemd's own measure of 0 (least) to 10."""


def users(**changes: object) -> ServiceDefinition:
    return definition(program=(PYTHON, "-m", "chairlift", "service", "run", "--"), output=None, **changes)


def systems(**changes: object) -> ServiceDefinition:
    return users(system=True, working_folder=Path("/var/lib/chairlift"), **changes)


def settings(text: str) -> dict[str, list[str]]:
    """Values by name; of those given twice, both."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    return found


def words(line: str) -> list[str]:
    """A command line as systemd splits it: systemd.service(5), "COMMAND LINES", and systemd.syntax(7),
    "QUOTING"; specifiers and variables resolved as far as we use them."""
    found, word, quote, at = [], None, "", 0
    while at < len(line):
        letter = line[at]
        at += 1
        if letter == "\\":
            word, at = (word or "") + line[at], at + 1
        elif quote:
            word, quote = (word or "", "") if letter == quote else ((word or "") + letter, quote)
        elif letter in "'\"":
            word, quote = word or "", letter
        elif letter in " \t":
            found += [word] if word is not None else []
            word = None
        else:
            word = (word or "") + letter
    assert not quote
    found += [word] if word is not None else []
    return [re.sub(r"%%|\$\$", lambda twice: twice[0][0], word) for word in found]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t"), max_size=12))
)
def test_any_argument_comes_through(serve: list[str]) -> None:
    text = unit(definition(serve=tuple(serve)))
    (line,) = settings(text)["ExecStart"]
    assert words(line) == [*definition().program, *serve]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_any_variable_comes_through(value: str) -> None:
    lines = settings(
        unit(
            definition(environment={"A": value}),
        )
    )["Environment"]
    # A dollar sign is nothing special there.
    assert words(lines[0].replace("$", "$$")) == [f"A={value}"]


def verify(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """What systemd has to say about it; empty is well."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    path = folder / "chairlift.service"
    path.write_text(text)
    ended = subprocess.run(
        [str(ANALYZE), "verify", *options, str(path)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in ended.stderr.splitlines() if "chairlift" in line]
    return "\n".join(complaints) or ("" if ended.returncode == 0 else ended.stderr)


@needs_systemd
@pytest.mark.parametrize(
    "service",
    [
        systems(),
        systems(user="root", folders=(Path("/srv/a b"), Path("/srv/50%"))),
        systems(
            credentials=(Credential("config", Path("/etc/lift.toml")),), serve=("--config", "/etc/lift.toml")
        ),
        systems(watchdog_s=660.0, before=("/bin/true",), low_port=True),
        systems(serve=("--model", '/it\'s "here"; $HOME 50%\\x')),
    ],
    ids=["its own user", "a user", "secrets", "all else", "odd words"],
)
def test_systemd_finds_nothing_wrong_with_a_system_unit(
    service: ServiceDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify(unit(service), tmp_path, monkeypatch) == ""


@needs_systemd
def test_systemd_finds_nothing_wrong_with_a_users_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify(unit(users(watchdog_s=660.0)), tmp_path, monkeypatch, "--user") == ""


@needs_systemd
def test_systemd_would_find_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = unit(systems()).replace("ProtectSystem=strict", "ProtectSystem=stricter")
    assert "stricter" in verify(wrong, tmp_path, monkeypatch)


@needs_systemd
def test_how_much_a_system_unit_is_exposed(tmp_path: Path) -> None:
    path = tmp_path / "chairlift.service"
    path.write_text(unit(systems()))
    command = [str(ANALYZE), "security", "--offline=true", "--no-pager", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    if not said:
        pytest.skip("this systemd does not rate files (it does from 250 on)")
    (exposure,) = re.findall(r"exposure level for \S+: ([0-9.]+)", said)
    assert float(exposure) <= MOST_EXPOSURE


@pytest.mark.parametrize("service", [users(), systems()], ids=["user", "system"])
def test_what_a_gpu_and_compilers_need_is_left_open(service: ServiceDefinition) -> None:
    closed = ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute")
    assert not set(closed) & set(settings(unit(service)))


@pytest.mark.parametrize("service", [users(), systems()], ids=["user", "system"])
def test_how_it_is_kept(service: ServiceDefinition) -> None:
    found = settings(unit(service))
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "RestartSec": "30",
        "RestartPreventExitStatus": "78",
        "TimeoutStartSec": "infinity",
        "TimeoutStopSec": "180",
        "KillMode": "mixed",
        "LimitNOFILE": "65536",
        "LimitCORE": "0",
        "StartLimitIntervalSec": "1800",
        "StartLimitBurst": "10",
        "NoNewPrivileges": "yes",
    }
    assert {name: found[name] for name in expected} == {name: [value] for name, value in expected.items()}
    assert "WatchdogSec" not in found


def test_a_users_unit_needs_no_namespace() -> None:
    """A user's manager may not be able to make one, and then the unit does not start (226/NAMESPACE)."""
    found = settings(unit(users()))
    assert not {name for name in found if name.startswith(("Private", "Protect", "ReadWrite", "Dynamic"))}
    assert found["WantedBy"] == ["default.target"]


def test_a_system_unit_is_confined() -> None:
    found = settings(unit(systems()))
    assert found["DynamicUser"] == found["PrivateTmp"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"] and found["ProtectHome"] == ["read-only"]
    assert found["StateDirectory"] == found["CacheDirectory"] == ["chairlift"]
    assert found["CapabilityBoundingSet"] == found["AmbientCapabilities"] == [""]
    assert found["WantedBy"] == ["multi-user.target"]
    named = settings(unit(systems(user="ada", folders=(Path("/a b"), Path("/c")))))
    assert named["User"] == ["ada"] and "DynamicUser" not in named
    assert named["ReadWritePaths"] == ['"-/a b" -/c']


def test_secrets_are_handed_over_by_systemd() -> None:
    secret = Credential("config", Path("/etc/lift.toml"))
    found = settings(unit(systems(credentials=(secret,), serve=("--config", "/etc/lift.toml"))))
    assert found["LoadCredential"] == ["config:/etc/lift.toml"]
    assert found["ExecStart"][0].endswith(" -- --config %d/config")


def test_a_low_port_needs_a_right() -> None:
    found = settings(unit(systems(low_port=True)))
    assert found["CapabilityBoundingSet"] == found["AmbientCapabilities"] == ["CAP_NET_BIND_SERVICE"]


def test_what_is_run_before() -> None:
    found = settings(unit(systems(before=("/usr/bin/nvidia-modprobe", "-u"))))
    assert found["ExecStartPre"] == ["-+/usr/bin/nvidia-modprobe -u"]


def test_names() -> None:
    assert (unit_name("chairlift"), unit_name("small")) == ("chairlift.service", "chairlift-small.service")
