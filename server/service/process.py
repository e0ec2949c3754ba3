"""The service's own process: it notes what becomes of it, and does not try again what cannot work."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from chairlift.server.complaint import complain, heard
from chairlift.server.lifecycle import witnessed
from chairlift.server.service import record as records
from chairlift.server.service.record import Record, RecordFile

INTERRUPTED = 130
"""What the command line returns for a signal before a server could answer to it."""
OUTPUT_MOST = 2**20
"""Bytes of what the supervisor keeps of standard output and error. Logs go elsewhere; this is what native
code and Python print in distress."""
OUTPUT_KEPT = 2**16


def run_service(
    serve: Callable[[Sequence[str]], int],
    words: Sequence[str],
    file: RecordFile,
    *,
    gave_up_exit: int = 0,
    output: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> int:
    """Serve, and return the process's exit code: 0 tells the supervisor to leave it at that.

    Args:
        serve: the command line, which returns its exit code.
        words: flags of `chairlift serve`.
        gave_up_exit: what to return where another start makes no sense.
        output: the file that standard output and error go to, to be kept short.
    """
    begun = records.begin(file.read(), os.getpid(), clock())
    file.write(begun)
    if begun.gave_up is not None:
        complain(f"Given up: {begun.gave_up}. Start the service to have it try again.")
        return gave_up_exit
    kept = Output(output) if output is not None else None
    if kept is not None:
        kept.begin()
    keeper = Keeper(file, begun, clock, kept)
    # Until the server has its own. What SIGHUP would have read again is read later anyway.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with witnessed(keeper), heard(keeper.hear):
        code = serve(["serve", *words])
    if code == INTERRUPTED:
        code = 0
    keeper.ended(code)
    if keeper.record.gave_up is not None:
        complain(f"Given up: {keeper.record.gave_up}.")
        return gave_up_exit
    return code


class Keeper:
    """Keeps the record of a server that runs. Its methods are called on the event loop, and `alive` on the
    watchdog's thread."""

    def __init__(
        self, file: RecordFile, record: Record, clock: Callable[[], float], output: Output | None
    ) -> None:
        self.record = record
        self._file = file
        self._clock = clock
        self._output = output
        self._said = ""
        self._lock = threading.Lock()

    def hear(self, line: str) -> None:
        """A complaint; the last one is the reason of the end."""
        self._said = line

    def listening(self, url: str) -> None:
        self._change(lambda record: records.listening(record, url))

    def ready(self, models: Sequence[str]) -> None:
        now = self._clock()
        self._change(lambda record: records.ready(record, tuple(models), now))

    def alive(self) -> None:
        if self._output is not None:
            self._output.trim()
        run = self.record.run
        if run is None or run.ready is None or run.settled or run.ended is not None:
            return
        if self._clock() - run.ready >= records.SETTLED_S:
            self._change(records.settled)

    def stopping(self) -> None:
        pass

    def ended(self, code: int) -> None:
        """Called once more where the server ends the process itself."""
        run = self.record.run
        if run is not None and run.ended is None:
            now, reason = self._clock(), "" if code == 0 else self._said
            self._change(lambda record: records.end(record, code, reason, now))

    def _change(self, change: Callable[[Record], Record]) -> None:
        with self._lock:
            self.record = change(self.record)
            self._file.write(self.record)


class Output:
    """The file that launchd opened for standard output and error, which it never cuts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_name(path.name + ".previous")

    def begin(self) -> None:
        """What an earlier process left goes aside: it may say why that died."""
        for descriptor in (1, 2):
            if self._is_ours(descriptor):
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        self._cut()

    def trim(self) -> None:
        try:
            if self.path.stat().st_size > OUTPUT_MOST:
                self._cut()
        except OSError:
            return

    def _is_ours(self, descriptor: int) -> bool:
        try:
            status = os.fstat(descriptor)
            return stat.S_ISREG(status.st_mode) and os.path.samestat(status, self.path.stat())
        except OSError:
            return False

    def _cut(self) -> None:
        """Its end is kept beside it, and it is empty."""
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - OUTPUT_KEPT))
                left = file.read()
                if left:
                    self.previous.write_bytes(left)
                file.truncate(0)
        except OSError:
            return
