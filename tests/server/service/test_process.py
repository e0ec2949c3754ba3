"""The service's own process, over a server that is none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from chairlift.server.complaint import complain
from chairlift.server.lifecycle import Lifecycle
from chairlift.server.notify import Notifier
from chairlift.server.service.process import OUTPUT_KEPT, OUTPUT_MOST, Keeper, Output, run_service
from chairlift.server.service.record import Ended, Record, RecordFile, begin

Serve = Callable[[Sequence[str]], int]


@pytest.fixture(autouse=True)
def handler_as_it_was() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def file(tmp_path: Path) -> RecordFile:
    return RecordFile(tmp_path / "record.json")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def fails(words: Sequence[str]) -> int:
    complain("The port is taken.")
    return 1


def test_a_server_that_comes_up_and_is_stopped(file: RecordFile) -> None:
    clock, seen = Clock(), []

    def serve(words: Sequence[str]) -> int:
        lifecycle = Lifecycle(notifier=Notifier({}))
        lifecycle.listening("http://127.0.0.1:1")
        seen.append((tuple(words), file.read().run))
        clock.now += 5
        for witness in lifecycle._witnesses:
            witness.ready(["a"])
        run = file.read().run
        assert run is not None and (run.ready, run.models, run.settled) == (1005.0, ("a",), False)
        for waited, is_settled in ((59, False), (2, True)):
            clock.now += waited
            lifecycle._alive()
            run = file.read().run
            assert run is not None and run.settled is is_settled
        return 0

    assert run_service(serve, ["--port", "1"], file, clock=clock) == 0
    ((words, run),) = seen
    assert words == ("serve", "--port", "1")
    assert run is not None and (run.pid, run.url, run.ready) == (os.getpid(), "http://127.0.0.1:1", None)
    ended = file.read()
    assert ended.failures == 0 and ended.run is not None
    assert ended.run.ended == Ended(1066.0, 0, "")


def test_its_last_complaint_is_the_reason(file: RecordFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service(fails, [], file) == 1
    record = file.read()
    assert record.failures == 1 and record.run is not None and record.run.ended is not None
    assert (record.run.ended.code, record.run.ended.reason) == (1, "The port is taken.")
    assert capsys.readouterr().err == "chairlift: The port is taken.\n"


@pytest.mark.parametrize("gave_up_exit", [0, 78])
def test_it_gives_up(gave_up_exit: int, file: RecordFile, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [run_service(fails, [], file, gave_up_exit=gave_up_exit) for _ in range(6)]
    # launchd and systemd start it four times more; a sixth start is somebody's.
    assert codes == [1, 1, 1, 1, gave_up_exit, 1]
    assert (
        "Given up: 5 starts in a row failed, the last with: The port is taken.\n" in capsys.readouterr().err
    )


def test_after_killed_starts_it_does_not_serve_at_all(file: RecordFile) -> None:
    record = Record()
    for pid in range(5):
        record = begin(record, pid, 1.0)
    file.write(record)

    def serve(words: Sequence[str]) -> int:
        raise AssertionError

    assert run_service(serve, [], file, gave_up_exit=78) == 78
    assert file.read().gave_up is not None


def test_a_signal_before_the_server_can_answer_to_it_is_a_stop(file: RecordFile) -> None:
    def serve(words: Sequence[str]) -> int:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        return 130

    assert run_service(serve, [], file) == 0
    run = file.read().run
    assert run is not None and run.ended is not None and run.ended.code == 0


def test_a_signal_to_read_keys_again_ends_none_that_still_looks_for_its_model(tmp_path: Path) -> None:
    """In a process of its own, which systemd would not start again after this signal."""
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from chairlift.server.service.process import run_service;"
        "from chairlift.server.service.record import RecordFile;"
        "serve = lambda words: os.kill(os.getpid(), signal.SIGHUP) or 0;"
        "sys.exit(run_service(serve, [], RecordFile(Path(sys.argv[1]))))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path / "record.json")], timeout=60)
    assert ran.returncode == 0


def test_where_the_server_ends_the_process_itself(file: RecordFile) -> None:
    """As its watchdog does, on a thread of its own."""
    ends: list[int] = []
    alarms: list[int] = []

    def serve(words: Sequence[str]) -> int:
        async def wedged() -> None:
            gone = asyncio.Event()
            over = threading.Event()
            loop = asyncio.get_running_loop()

            def exit(code: int) -> None:
                ends.append(code)
                loop.call_soon_threadsafe(gone.set)
                over.wait()

            lifecycle = Lifecycle(
                watchdog_s=0.1,
                notifier=Notifier({}),
                complain=complain,
                exit=exit,  # type: ignore[arg-type]
                alarm=alarms.append,
            )
            lifecycle.ready(["a"], lambda: 10.0)
            await asyncio.wait_for(gone.wait(), 20)
            lifecycle.ended()
            over.set()

        asyncio.run(wedged())
        record = file.read()
        assert record.run is not None and record.run.ended is not None
        assert record.run.ended.code == 70
        # Which of the two hangs is told by half of a limit that is very short here.
        assert ": nothing has moved for " in record.run.ended.reason
        return 1

    run_service(serve, [], file)
    run = file.read().run
    assert (
        ends == [70]
        and len(alarms) == 1
        and run is not None
        and run.ended is not None
        and run.ended.code == 70
    )


def test_what_it_prints_is_kept_short(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"the trace of an earlier crash\n")
    output = Output(path)
    output.begin()
    assert path.read_bytes() == b""
    assert output.previous.read_bytes() == b"the trace of an earlier crash\n"
    path.write_bytes(b"x" * OUTPUT_MOST)
    output.trim()
    assert path.stat().st_size == OUTPUT_MOST
    path.write_bytes(b"y" * OUTPUT_MOST + b"end")
    output.trim()
    assert path.read_bytes() == b""
    kept = output.previous.read_bytes()
    assert len(kept) == OUTPUT_KEPT and kept.endswith(b"yyend")
    Output(tmp_path / "gone").begin()
    Output(tmp_path / "gone").trim()


def test_what_is_cut_leaves_no_hole(tmp_path: Path) -> None:
    """A process goes on writing at the end of its file, wherever it was before, also if it was not opened for
    appending."""
    path = tmp_path / "out"
    path.write_bytes(b"earlier\n")
    code = (
        "import sys; from pathlib import Path; from chairlift.server.service.process import Output;"
        "print('before', flush=True); output = Output(Path(sys.argv[1])); output.begin(); output._cut();"
        "print('after', flush=True)"
    )
    with path.open("r+b") as opened:
        opened.seek(0, os.SEEK_END)
        subprocess.run([sys.executable, "-c", code, str(path)], stdout=opened, stderr=opened, check=True)
    assert path.read_bytes() == b"after\n"
    assert Output(path).previous.read_bytes() == b"earlier\nbefore\n"


def test_a_keeper_notes_one_end_only(file: RecordFile) -> None:
    keeper = Keeper(file, begin(Record(), 1, 1.0), Clock(), None)
    keeper.ended(70)
    keeper.ended(0)
    run = file.read().run
    assert run is not None and run.ended is not None and run.ended.code == 70
