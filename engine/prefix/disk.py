"""The prefix cache's second tier: pages and checkpoints as files, shared by processes and models.

    <folder>/<model>/<first byte of the digest>/<digest>.safetensors

One thread writes, evicts and looks around, a few others read; nothing here waits for the step, and nothing
that goes wrong here is more than a page that is not there. All models below the folder share one bound in
bytes. What was used least recently goes first: a file's time of change says when that was, and what is deep
in a sequence counts as older than what is before it, without which it is of no use.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from queue import SimpleQueue

from chairlift.engine.prefix.fetch import Fetch
from chairlift.engine.prefix.files import SUFFIX, BadFile, read_page, write_page
from chairlift.engine.prefix.folder import all_files, pages_of, unlink, unlink_unfinished
from chairlift.engine.prefix.reading import Done, Reading
from chairlift.engine.prefix.vocabulary import DiskStats, Page, PageData, ReadPage

log = logging.getLogger(__name__)

QUEUE_BYTES = 2**30
"""Most bytes that wait to be written, unless more is allowed; what comes on top is not kept on the disk."""
RESCAN_SECONDS = 60.0
"""Between two looks at what other processes have done."""
RETRY_SECONDS = 60.0
"""Without writing after the disk has refused."""
AGE_PER_TOKEN = 0.01
"""Seconds by which a page counts as older for every token before it: more than computing one takes."""
SHARE_BETWEEN_SCANS = 16
"""The folder is looked at again after so small a part of the limit has been written. As much is left free,
for another process that does the same."""
TOUCH_SECONDS = 600.0
"""A page that memory has is marked as used so often at most."""
MOST_NAMES = 200_000
"""That are remembered of pages touched, or left out."""
READERS = 4


@dataclass(slots=True)
class _Write:
    page: Page
    nbytes: int
    read: ReadPage | None
    """None once it is done with: it holds memory of the runner's."""


class PrefixDisk:
    """
    Args:
        folder: shared by all models and processes.
        model: names everything that makes pages what they are (`chairlift.engine.models.identity`).
        limit: bytes of all files below `folder`.
        queue: most bytes that wait to be written.
        clock: seconds of the time of day.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        limit: int,
        *,
        queue: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = model
        self._root = folder
        self._folder = folder / model
        self._limit = limit
        self._queue = queue
        self._clock = clock
        self._known: set[bytes] = set()
        self._used = 0
        self._since_scan = 0
        self._reads = self._writes = self._skipped = self._failures = 0
        self._refused_at: float | None = None
        self._changed = threading.Condition()
        self._jobs: deque[_Write | Callable[[], None]] = deque()
        self._queued: set[bytes] = set()
        self._queued_bytes = 0
        self._returned: list[int] = []
        self._outdated = False
        self._closing = False
        self._given_up = threading.Event()
        self._reading = threading.Lock()  # of the runner's memory
        self._left_out: set[bytes] = set()
        self._touched: dict[bytes, float] = {}
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        # Daemons: a disk that hangs must not keep the process from ending.
        self._writer = threading.Thread(target=self._work, name="chairlift-disk", daemon=True)
        self._readers = [
            threading.Thread(target=self._read, name=f"chairlift-disk-{number}", daemon=True)
            for number in range(READERS)
        ]

    def open(self) -> None:
        """Look at what there is, then begin to work. May take seconds.

        Raises:
            OSError: the folder cannot be made or read.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._known = {digest for digest, _ in pages_of(self._folder)}
        self._count()
        for thread in (self._writer, *self._readers):
            thread.start()

    def __contains__(self, digest: bytes) -> bool:
        """Whether there is a file of this name, as far as is known. From any thread."""
        return digest in self._known

    @property
    def stats(self) -> DiskStats:
        counts = self._reads, self._writes, self._skipped, self._failures
        return DiskStats(self._limit, self._used, len(self._known), *counts)

    # What is kept: called on the MLX thread (`PageSink`)

    def wants(self, page: Page, nbytes: int) -> bool:
        """There is use and room for it."""
        with self._changed:
            if not self._new(page) or self._closing:
                return False
            if self._queued_bytes + nbytes <= self._queue and page.parent not in self._left_out:
                return True
            self._leave_out(page)
            return False

    def offer(self, page: Page, nbytes: int, read: ReadPage) -> None:
        """Write a page, soon."""
        with self._changed:
            if not self._new(page) or self._closing:
                self._returned.append(page.id)
                return
            self._left_out.discard(page.digest)
            self._queued.add(page.digest)
            self._queued_bytes += nbytes
            self._jobs.append(_Write(page, nbytes, read))
            self._changed.notify_all()

    def _new(self, page: Page) -> bool:
        """The lock is held."""
        return page.digest not in self._known and page.digest not in self._queued

    def _leave_out(self, page: Page) -> None:
        """What is behind it is left out, too: it would be of no use. The lock is held."""
        self._skipped += 1
        if len(self._left_out) >= MOST_NAMES:
            self._left_out.clear()
        self._left_out.add(page.digest)

    def returned(self) -> list[int]:
        with self._changed:
            returned, self._returned = self._returned, []
        return returned

    # What is read

    def fetch(self, fetch: Fetch, wanted: Callable[[], bool], done: Done) -> None:
        """Read files on threads of this tier; `done` is called on one of them, once, with what is right.

        Args:
            wanted: asked before each file; where it says no, the rest is left.
        """
        with self._changed:
            if self._closing or not fetch.pages:
                return
            reading = Reading(fetch, self.read, wanted, done, READERS)
            for _ in range(reading.readers):
                self._readings.put(reading)

    def _read(self) -> None:
        while (reading := self._readings.get()) is not None:
            reading.go_on()
            del reading  # it holds what was read

    def read(self, page: Page) -> PageData | None:
        """A page, if its file is there and right; a file that is not right is deleted."""
        path = self._path(page.digest)
        try:
            data = read_page(path, page)
        except FileNotFoundError:
            self._known.discard(page.digest)
            self._look_again()
            return None
        except (BadFile, OSError, MemoryError) as error:
            log.warning("a file of the prefix cache cannot be used: %s", error)
            self._known.discard(page.digest)
            if isinstance(error, BadFile):
                unlink(path)
            with self._changed:
                self._failures += 1
            return None
        with self._changed:
            self._reads += 1
        self._touch(path, page)
        return data

    def used(self, pages: Sequence[Page]) -> None:
        """Memory's copies of these are in use: they are not to go from the disk."""
        if pages:
            self._enqueue(lambda: self._mark_used(pages))

    # What is lost

    def discard(self, digests: Iterable[bytes]) -> None:
        """Delete these, behind what is queued to be written now."""
        if gone := tuple(digests):
            self._enqueue(lambda: self._discard(gone))

    def clear(self) -> None:
        """Delete all files of this model, behind what is queued to be written now."""
        self._enqueue(self._clear)

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until everything queued so far is done; False if that takes longer than `timeout` seconds."""
        done = threading.Event()
        return self._enqueue(done.set) and done.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Write what is queued, for so many seconds at most, and end. False: a thread does not come back.

        After that no memory of the runner is used; after False what is being written may be, and no more.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for _ in self._readers:
            self._readings.put(None)
        if not self._writer.is_alive():
            return True
        self._writer.join(timeout)
        with self._changed:
            for job in [job for job in self._jobs if isinstance(job, _Write)]:
                self._give_back(job)
            self._jobs.clear()
        # One file more, at most, is being written.
        self._writer.join(max(1.0, end - time.monotonic()))
        self._given_up.set()
        if self._reading.acquire(timeout=1.0):
            self._reading.release()
        return not self._writer.is_alive()

    # The thread that writes

    def _enqueue(self, job: Callable[[], None]) -> bool:
        with self._changed:
            if self._closing:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def _work(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                if not self._jobs and not self._closing:
                    self._changed.wait(RESCAN_SECONDS)
                job = self._jobs.popleft() if self._jobs else None
                if job is None and self._closing:
                    return
            try:
                if isinstance(job, _Write):
                    self._write(job)
                elif job is not None:
                    job()
                if time.monotonic() - last >= RESCAN_SECONDS and not self._closing:
                    self._rescan()
                    last = time.monotonic()
            except Exception:
                log.exception("the prefix cache on the disk")

    def _write(self, job: _Write) -> None:
        page, data, written = job.page, None, None
        assert job.read is not None
        try:
            if self._refused_at is not None and time.monotonic() - self._refused_at < RETRY_SECONDS:
                return
            self._make_room(job.nbytes)
            with self._reading:
                data = job.read() if not self._given_up.is_set() else None
            if data is None:
                self._failures += 1
                return
            path = self._path(page.digest)
            try:
                written = write_page(path, page, data)
            except FileNotFoundError:  # its folder is not there yet, or another process has cleared the cache
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                written = write_page(path, page, data)
            self._touch(path, page)
        except OSError as error:
            self._failures += 1
            if self._refused_at is None:
                log.warning("prefixes are not written to the disk for now: %s", error.strerror or error)
            self._refused_at = time.monotonic()
        finally:
            del data
            with self._changed:
                if written is not None:
                    self._known.add(page.digest)
                    self._writes += 1
                    self._used += written
                    self._since_scan += written
                else:
                    self._leave_out(page)
                self._give_back(job)
        if written is not None and self._refused_at is not None:
            self._refused_at = None
            log.warning("prefixes are written to the disk again")

    def _give_back(self, job: _Write) -> None:
        """The lock is held."""
        self._queued.discard(job.page.digest)
        self._queued_bytes -= job.nbytes
        job.read = None
        self._returned.append(job.page.id)

    def _make_room(self, need: int) -> None:
        """Raises: OSError where there is none."""
        limit = self._limit - self._limit // SHARE_BETWEEN_SCANS
        if self._since_scan + need > self._limit // SHARE_BETWEEN_SCANS:
            self._count()
        if self._used + need <= limit:
            return
        files = sorted(all_files(self._root), key=lambda file: file.used)
        self._used = sum(file.size for file in files)
        goal = limit - limit // SHARE_BETWEEN_SCANS - need
        for file in files:
            if self._used <= max(0, goal):
                break
            if unlink(file.path):
                self._used -= file.size
                if file.path.parent.parent == self._folder:
                    self._known.discard(file.digest)
        if self._used + need > limit:
            raise OSError(0, "a page is larger than the limit")

    def _count(self) -> None:
        self._used = sum(file.size for file in all_files(self._root))
        self._since_scan = 0

    def _look_again(self) -> None:
        """Others have deleted files, and likely more than one."""
        with self._changed:
            looking, self._outdated = self._outdated, True
        if not looking:
            self._enqueue(self._rescan)

    def _rescan(self) -> None:
        with self._changed:
            self._outdated = False
        self._known = {digest for digest, _ in pages_of(self._folder)}
        self._count()
        unlink_unfinished(self._root, self._clock())

    def _discard(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._known.discard(digest)
            unlink(self._path(digest))

    def _clear(self) -> None:
        self._known.clear()
        self._left_out.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._count()

    def _mark_used(self, pages: Sequence[Page]) -> None:
        now = time.monotonic()
        if len(self._touched) >= MOST_NAMES:
            self._touched.clear()
        for page in pages:
            if page.digest in self._known and now - self._touched.get(page.digest, -inf) >= TOUCH_SECONDS:
                self._touched[page.digest] = now
                self._touch(self._path(page.digest), page)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / f"{name}{SUFFIX}"

    def _touch(self, path: Path, page: Page) -> None:
        """Used now."""
        when = self._clock() - page.start * AGE_PER_TOKEN
        with suppress(OSError):
            os.utime(path, (when, when))
