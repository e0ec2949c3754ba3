"""systemctl and journalctl are called with exactly these arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.supervisor import Seen
from chairlift.server.service.systemd import GRACE_S, SHOWN, Systemd
from tests.server.service.definitions import Became, Programs

HOME = Path("/home/ada")
UNIT = "chairlift.service"
SHOW = ("systemctl", "--user", "show", UNIT, f"--property={','.join(SHOWN)}")


def shown(**changes: str) -> str:
    given = {
        "LoadState": "loaded",
        "ActiveState": "active",
        "SubState": "running",
        "MainPID": "77",
        "ExecMainCode": "0",
        "ExecMainStatus": "0",
        "ExecMainExitTimestampMonotonic": "0",
        "Result": "success",
        "NRestarts": "0",
    }
    return "".join(f"{name}={value}\n" for name, value in {**given, **changes}.items())


@pytest.fixture
def programs() -> Iterator[Programs]:
    expected = Programs()
    yield expected
    expected.done()


def systemd(programs: Programs, *, system: bool = False, name: str = "chairlift") -> Systemd:
    return Systemd(programs, name=name, system=system, home=HOME)


def test_where_its_file_is(programs: Programs) -> None:
    assert systemd(programs).file == Path("/home/ada/.config/systemd/user/chairlift.service")
    small = systemd(programs, system=True, name="small")
    assert small.file == Path("/etc/systemd/system/chairlift-small.service")


@pytest.mark.parametrize(("system", "manager"), [(False, ["--user"]), (True, [])])
def test_it_is_enabled_and_started_without_waiting(
    system: bool, manager: list[str], programs: Programs
) -> None:
    for words in (
        ["daemon-reload"],
        ["enable", UNIT],
        ["reset-failed", UNIT],
        ["start", "--no-block", UNIT],
    ):
        programs.expect("systemctl", *manager, *words)
    systemd(programs, system=system).load()


def test_a_refusal_says_what_systemctl_said(programs: Programs) -> None:
    programs.expect(
        "systemctl", "--user", "daemon-reload", code=1, err="Failed to connect to bus:\nNo medium\n"
    )
    with pytest.raises(
        ServiceFault, match=r"daemon-reload failed \(1\): Failed to connect to bus: No medium"
    ):
        systemd(programs).load()


def test_stopping_waits_as_long_as_it_may_take(programs: Programs) -> None:
    programs.expect("systemctl", "--user", "stop", UNIT)
    systemd(programs).stop()
    assert programs.timeouts["systemctl --user"] == 180 + GRACE_S


def test_it_is_forgotten(programs: Programs) -> None:
    programs.expect(*SHOW, out=shown())
    programs.expect("systemctl", "--user", "disable", "--now", UNIT)
    programs.expect("systemctl", "--user", "reset-failed", UNIT, code=1)
    programs.expect("systemctl", "--user", "daemon-reload")
    forgotten = systemd(programs)
    forgotten.forget()
    forgotten.reread()


def test_starting_again_clears_what_failed(programs: Programs) -> None:
    programs.expect("systemctl", "--user", "reset-failed", UNIT)
    programs.expect("systemctl", "--user", "start", "--no-block", UNIT)
    systemd(programs).start()


def test_what_is_seen_of_it(programs: Programs) -> None:
    programs.expect(*SHOW, out=shown())
    assert systemd(programs).seen() == Seen(
        installed=True, pid=77, state="active (running)", last_exit=None, starts=1
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ExecMainCode": "1", "ExecMainStatus": "0"}, "exit code 0: it was asked to stop"),
        (
            {"ExecMainCode": "1", "ExecMainStatus": "70", "Result": "exit-code"},
            "exit code 70: the watchdog ended it: a step of the model did not come back",
        ),
        (
            {"ExecMainCode": "2", "ExecMainStatus": "11", "Result": "signal"},
            "killed by SIGSEGV: a fault in native code",
        ),
        (
            {"ExecMainCode": "3", "ExecMainStatus": "6", "Result": "core-dump"},
            "killed by SIGABRT: it aborted itself, or the supervisor's watchdog did not hear of it",
        ),
        (
            {"ExecMainCode": "2", "ExecMainStatus": "9", "Result": "oom-kill"},
            "killed because the machine ran out of memory",
        ),
        (
            {"ExecMainCode": "2", "ExecMainStatus": "9", "Result": "timeout"},
            "killed: it took longer to stop than it may (TimeoutStopSec, 180 s or more)",
        ),
        ({"ExecMainCode": "2", "ExecMainStatus": "64", "Result": "signal"}, "killed by SIGRTMAX"),
    ],
)
def test_the_last_exit_in_words(changes: dict[str, str], expected: str, programs: Programs) -> None:
    down = {"MainPID": "0", "ActiveState": "failed", "SubState": "failed"}
    out = shown(**down, ExecMainExitTimestampMonotonic="12345", **changes)
    programs.expect(*SHOW, out=out)
    seen = systemd(programs).seen()
    assert (seen.pid, seen.last_exit, seen.state) == (None, expected, "failed (failed)")
    assert not seen.gave_up


def test_systemd_gives_up_as_well(programs: Programs) -> None:
    changes = {"MainPID": "0", "Result": "start-limit-hit", "ExecMainExitTimestampMonotonic": "1"}
    programs.expect(*SHOW, out=shown(**changes, NRestarts="9"))
    seen = systemd(programs).seen()
    assert seen.gave_up and seen.starts == 10
    assert seen.last_exit == "systemd gave up: too many starts in a short time"


def test_one_that_will_be_started_again(programs: Programs) -> None:
    programs.expect(*SHOW, out=shown(MainPID="0", ActiveState="activating", SubState="auto-restart"))
    assert systemd(programs).seen().restarting


def test_a_unit_that_is_not_there(programs: Programs) -> None:
    programs.expect(*SHOW, out=shown(LoadState="not-found", ActiveState="inactive", MainPID="0"))
    assert not systemd(programs).seen().installed


def test_a_manager_that_does_not_answer(programs: Programs) -> None:
    programs.expect(*SHOW, code=1, err="Failed to connect to bus")
    with pytest.raises(ServiceFault, match="Failed to connect to bus"):
        systemd(programs).seen()


@pytest.mark.parametrize(
    ("system", "follow", "words"),
    [
        (False, False, ["--user-unit", UNIT, "--lines", "50", "--no-pager"]),
        (True, True, ["--unit", UNIT, "--lines", "50", "--follow"]),
    ],
)
def test_logs_are_the_journals(system: bool, follow: bool, words: list[str], programs: Programs) -> None:
    programs.expect("journalctl", *words)
    with pytest.raises(Became):
        systemd(programs, system=system).logs(50, follow=follow)
