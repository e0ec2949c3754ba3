"""launchctl is called with exactly these arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.launchd import GRACE_S, LAUNCHCTL, Launchd
from chairlift.server.service.supervisor import Seen
from tests.server.service.definitions import HOME, Programs

TARGET = "gui/501/org.chairlift.server"
FILE = "/Users/ada/Library/LaunchAgents/org.chairlift.server.plist"
ABSENT = {"code": 113, "err": 'Could not find service "org.chairlift.server" in domain for user gui: 501'}
PRINTED = """\
gui/501/org.chairlift.server = {
\tactive count = 1
\tpath = /Users/ada/Library/LaunchAgents/org.chairlift.server.plist
\ttype = LaunchAgent
\tstate = running

\tprogram = /opt/lift/bin/python
\targuments = {
\t\t/opt/lift/bin/python
\t\tstate = misleading
\t}

\tdefault environment = {
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}

\tdomain = gui/501 [100003]
\tminimum runtime = 30
\texit timeout = 180
\truns = 3
\tpid = 4242
\timmediate reason = inefficient
\tforks = 0
\tlast exit code = 1

\tspawn type = interactive (4)
\tproperties = keepalive | runatload | inferred program
}
"""
"""As macOS 14 prints a job, abridged."""


@pytest.fixture
def programs() -> Iterator[Programs]:
    expected = Programs()
    yield expected
    expected.done()


class Clock:
    """Time passes by pausing."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def launchd(programs: Programs, *, system: bool = False, name: str = "chairlift") -> Launchd:
    clock = Clock()
    return Launchd(programs, name=name, system=system, home=HOME, uid=501, clock=clock, pause=clock.pause)


def launchctl(*words: str) -> tuple[str, ...]:
    return (LAUNCHCTL, *words)


def test_where_its_file_is(programs: Programs) -> None:
    assert launchd(programs).file == Path(FILE)
    daemon = launchd(programs, system=True, name="small")
    assert daemon.file == Path("/Library/LaunchDaemons/org.chairlift.server.small.plist")


def test_an_agent_is_bootstrapped_into_its_users_session(programs: Programs) -> None:
    programs.expect(*launchctl("enable", TARGET)).expect(*launchctl("bootstrap", "gui/501", FILE))
    launchd(programs).load()


def test_a_daemon_is_bootstrapped_into_the_system(programs: Programs) -> None:
    file = "/Library/LaunchDaemons/org.chairlift.server.plist"
    programs.expect(*launchctl("enable", "system/org.chairlift.server"))
    programs.expect(*launchctl("bootstrap", "system", file))
    launchd(programs, system=True).load()


def test_a_refusal_says_what_launchctl_said(programs: Programs) -> None:
    programs.expect(*launchctl("enable", TARGET))
    programs.expect(
        *launchctl("bootstrap", "gui/501", FILE), code=5, err="Bootstrap failed: 5: Input/output error\n"
    )
    with pytest.raises(ServiceFault, match=r"bootstrap failed \(5\): Bootstrap failed: 5: Input.*--system"):
        launchd(programs).load()


def test_it_is_booted_out_and_its_end_is_waited_for(programs: Programs) -> None:
    programs.expect(*launchctl("print", TARGET), out=PRINTED)
    programs.expect(
        *launchctl("bootout", TARGET), code=36, err="Boot-out failed: 36: Operation now in progress"
    )
    programs.expect(*launchctl("print", TARGET), out=PRINTED)
    programs.expect(*launchctl("print", TARGET), out=PRINTED)
    programs.expect(*launchctl("print", TARGET), **ABSENT)
    launchd(programs).stop()
    assert programs.timeouts[f"{LAUNCHCTL} bootout"] == 180 + GRACE_S


def test_one_that_does_not_stop_is_a_fault() -> None:
    class Stuck(Programs):
        def run(self, arguments: object, timeout_s: float = 0) -> object:  # type: ignore[override]
            from chairlift.server.service.commands import Ran

            return Ran(0, PRINTED)

    with pytest.raises(ServiceFault, match="does not stop"):
        launchd(Stuck()).stop()


def test_what_is_not_loaded_needs_no_stopping(programs: Programs) -> None:
    programs.expect(*launchctl("print", TARGET), **ABSENT)
    launchd(programs).stop()


def test_one_that_is_loaded_and_down_is_kicked(programs: Programs) -> None:
    programs.expect(*launchctl("print", TARGET), out=PRINTED).expect(*launchctl("kickstart", TARGET))
    launchd(programs).start()


def test_one_that_is_not_loaded_is_started_by_loading_it(programs: Programs) -> None:
    programs.expect(*launchctl("print", TARGET), **ABSENT)
    programs.expect(*launchctl("enable", TARGET)).expect(*launchctl("bootstrap", "gui/501", FILE))
    launchd(programs).start()


def test_what_is_seen_of_it(programs: Programs) -> None:
    programs.expect(*launchctl("print", TARGET), out=PRINTED)
    assert launchd(programs).seen() == Seen(
        installed=True,
        pid=4242,
        state="running",
        last_exit="exit code 1: a fault; the log says which",
        starts=3,
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ("last exit code = (never exited)", None),
        ("last exit code = 0", "exit code 0: it was asked to stop"),
        (
            "last exit code = 78: EX_CONFIG",
            "exit code 78: it gave up, or could not be run at all (a program or folder that is not there)",
        ),
        (
            "last exit code = 0\n\tlast terminating signal = Killed: 9",
            "killed by SIGKILL: out of memory, or it took longer to stop than it may",
        ),
        ("nothing = known", None),
    ],
)
def test_the_last_exit_in_words(entries: str, expected: str | None, programs: Programs) -> None:
    text = f"{TARGET} = {{\n\tstate = not running\n\t{entries}\n}}\n"
    programs.expect(*launchctl("print", TARGET), out=text)
    seen = launchd(programs).seen()
    assert (seen.installed, seen.pid, seen.last_exit) == (True, None, expected)


def test_what_launchd_does_not_know(programs: Programs) -> None:
    programs.expect(*launchctl("print", TARGET), **ABSENT)
    assert launchd(programs).seen() == Seen(installed=False)


def test_logs_are_the_services_own(programs: Programs) -> None:
    assert launchd(programs).logs(10, follow=True) is None  # type: ignore[func-returns-value]
