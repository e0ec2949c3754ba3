"""Ends of a process in words."""

from __future__ import annotations

import signal

from chairlift.server.lifecycle import WATCHDOG_EXIT
from chairlift.server.service.definition import GAVE_UP, STOP_S

_CODES = {
    0: "it was asked to stop",
    1: "a fault; the log says which",
    2: "flags that it does not understand",
    WATCHDOG_EXIT: "the watchdog ended it: a step of the model did not come back",
    GAVE_UP: "it gave up, or could not be run at all (a program or folder that is not there)",
    126: "the program may not be run",
    127: "the program is not there",
    200: "its working folder cannot be entered",
    203: "the program could not be run",
    217: "its user is not known",
    226: "its confinement could not be set up",
    238: "its cache folder could not be made",
    243: "its files of secrets could not be handed over",
}
"""Those from 200 on are systemd's own (systemd.exec(5), "process exit codes")."""

_SIGNALS = {
    signal.SIGKILL: "out of memory, or it took longer to stop than it may",
    signal.SIGABRT: "it aborted itself, or the supervisor's watchdog did not hear of it",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGBUS: "a fault in native code, or a file on a disk that went away",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGALRM: "the watchdog ended it, and could not say so: nobody reads what it writes",
    signal.SIGTERM: "it was asked to stop before it could answer to that",
}

_RESULTS = {
    "oom-kill": "killed because the machine ran out of memory",
    "watchdog": "ended by systemd's watchdog: it gave no sign of life",
    "timeout": f"killed: it took longer to stop than it may (TimeoutStopSec, {STOP_S} s or more)",
    "start-limit-hit": "systemd gave up: too many starts in a short time",
}


def code_in_words(code: int) -> str:
    """Of an exit code."""
    return f"exit code {code}" + (f": {words}" if (words := _CODES.get(code)) else "")


def signal_in_words(number: int) -> str:
    """Of the number of the signal that ended the process."""
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"killed by signal {number}"
    return f"killed by {known.name}" + (f": {words}" if (words := _SIGNALS.get(known)) else "")


def result_in_words(result: str) -> str | None:
    """Of systemd's `Result` of a unit, where it says more than the exit code does."""
    return _RESULTS.get(result)
