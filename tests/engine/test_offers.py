"""What the disk is offered where the host is not to touch what is kept: copies, counted, and gone in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from chairlift.cache import transfer as transfer_module
from chairlift.cache.pages import ALIGNMENT
from chairlift.cache.transfer import Driver, DriverError, Transfer
from chairlift.engine import offers as offers_module
from chairlift.engine import pages as pages_module
from chairlift.engine.flight import Flight
from chairlift.engine.models.build import make_runner
from chairlift.engine.offers import Offers
from chairlift.engine.pages import PageStore
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.prefix.vocabulary import Page, ReadPage, Save
from tests.cache.driver import FakeDriver, fake_kernel
from tests.mlx.configs import VOCABULARY
from tests.mlx.parity import finding, solo
from tests.mlx.prefix_server import Server, words

FAMILIES = ["llama", "qwen3_5"]
PROMPT = words(3, 150)
WAYS = ["driver", "none"]
"""Past unified memory, or through it."""


def way_of(name: str) -> Transfer | None:
    return Transfer(Driver(FakeDriver())) if name == "driver" else None


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transfer | None:
    monkeypatch.setattr(transfer_module, "_kernel", fake_kernel)
    return way_of(request.param)


@pytest.fixture
def cuda(way: Transfer | None, monkeypatch: pytest.MonkeyPatch) -> Transfer | None:
    """The store takes this for a machine with a CUDA device."""
    monkeypatch.setattr(pages_module, "on_cuda", lambda: True)
    monkeypatch.setattr(pages_module, "transfer", lambda: way)
    return way


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[PrefixDisk]:
    disk = PrefixDisk(tmp_path, "0" * 32, 10**9)
    disk.open()
    yield disk
    assert disk.close(10)


@dataclass
class Sink:
    """Wants what is within `room`, and reads when a test says so."""

    room: int = 10**9
    asked: list[tuple[int, int]] = field(default_factory=list)
    offered: dict[int, tuple[int, ReadPage]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)

    def wants(self, page: Page, nbytes: int) -> bool:
        self.asked.append((page.id, nbytes))
        return nbytes <= self.room

    def offer(self, page: Page, nbytes: int, read: ReadPage) -> None:
        assert page.id not in self.offered
        self.offered[page.id] = nbytes, read

    def returned(self) -> list[int]:
        done, self.done = self.done, []
        return done

    def taken(self, id: int) -> tuple[bytes, str]:
        """What is read of a page, which comes back."""
        size, read = self.offered.pop(id)
        data = read()
        self.done.append(id)
        assert data is not None and data.data.nbytes == size
        return bytes(data.data), data.shapes


def new(*sizes: int, first: int = 1) -> list[tuple[Page, mx.array]]:
    """Pages that nobody has computed yet."""
    return [
        (Page(id, 0, 4, bytes([id])), (mx.arange(size, dtype=mx.int32) * id).astype(mx.uint8))
        for id, size in enumerate(sizes, first)
    ]


def of(array: mx.array) -> np.ndarray:
    return np.frombuffer(memoryview(array), dtype=np.uint8)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(40_000,), (40_000, 64, 20_000)])
def test_what_is_read_is_as_kept_and_lies_elsewhere(sizes: tuple[int, ...], way: Transfer | None) -> None:
    sink = Sink()
    offers = Offers(sink, apart=True, transfer=way)
    made = new(*sizes)
    mx.eval(offers.copy(made))
    for page, data in made:
        offers.offer(page, data, f"shapes {page.id}")
    kept = [of(data) for _, data in made]
    copies = [of(found.data) for found, _, _ in offers._copies.values()]
    assert not any(np.shares_memory(one, other) for one in kept for other in copies)
    for (page, _), data in zip(made, kept, strict=True):
        assert sink.taken(page.id) == (bytes(data), f"shapes {page.id}")


def test_copies_count_until_all_of_an_array_are_written(
    way: Transfer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers_module, "COPY_BYTES", 5000)
    sink = Sink()
    offers = Offers(sink, apart=True, transfer=way)
    made = new(2000, 3000, 4000, 9000)
    offers.copy(made)
    sizes = [5000 + ALIGNMENT, 4000 + ALIGNMENT, 9000 + ALIGNMENT]
    assert (offers.nbytes, offers.buffers) == (sum(sizes), 3)
    for page, data in made:
        offers.offer(page, data, "")
    left = []
    for id in (1, 3, 2, 4):
        sink.taken(id)
        offers.take_back()
        left.append(offers.nbytes)
    assert left == [sum(sizes), sizes[0] + sizes[2], sizes[2], 0] and offers.buffers == 0


def test_what_is_to_come_takes_room_too(way: Transfer | None) -> None:
    """A step's pages are wanted before those of the step before it have been offered."""
    sink = Sink(room=5000)
    offers = Offers(sink, apart=True, transfer=way)
    first, second = new(2000, 2000), new(2000, 500, first=3)
    offers.copy(first)
    offers.copy(second)
    assert sink.asked == [(1, 2000), (2, 4000), (3, 6000), (4, 4500)]
    for page, data in first:
        offers.offer(page, data, "")
    assert offers.copy(new(1000, first=5)) and sink.asked[-1] == (5, 1500), "the sink counts what it has"
    for page, data in second:
        offers.offer(page, data, "")
    assert sorted(sink.offered) == [1, 2, 4]


def test_what_cannot_be_copied_takes_no_room_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    offers = Offers(sink, apart=True, transfer=Transfer(Driver(FakeDriver())))

    def refuses(array: mx.array) -> mx.array:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Transfer, "address", lambda self, array: refuses(array))
    with pytest.raises(RuntimeError):
        offers.copy(new(2000))
    offers.withhold([1])
    monkeypatch.setattr(offers, "_transfer", None)
    offers.copy(new(500, first=2))
    assert sink.asked[-1] == (2, 500)


def test_what_is_written_takes_room_until_all_of_its_array_is(
    way: Transfer | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room again, memory has not: that is set apart for what waits, and no more."""
    queue, disk = 10_000, PrefixDisk(tmp_path, "0" * 32, 10**9, queue=10_000)
    offers = Offers(disk, apart=True, transfer=way)
    for first in range(1, 60, 6):
        made = new(*[1000, 2000, 500] * 2, first=first)
        mx.eval(offers.copy(made))
        for page, data in made:
            offers.offer(page, data, "")
        assert offers.nbytes <= queue + offers.buffers * ALIGNMENT
        for _ in range(min(4, len(disk._jobs))):
            job = disk._jobs.popleft()
            assert not callable(job)
            disk._write(job)
    assert disk.stats.writes > 20 and disk.stats.skipped > 0


def test_what_is_dropped_before_it_is_offered_is_not(way: Transfer | None) -> None:
    sink = Sink()
    offers = Offers(sink, apart=True, transfer=way)
    made = new(1000, 2000)
    offers.copy(made)
    offers.withhold([2, 77])
    for page, data in made:
        offers.offer(page, data, "")
    assert list(sink.offered) == [1] and offers.nbytes > 0
    offers.copy(new(500, first=9))
    assert sink.asked[-1] == (9, 2500), "what is not offered has gone once the other of its array has"
    offers.withhold([1, 9])
    assert offers.nbytes == 3000 + ALIGNMENT, "what is being read stays"
    sink.taken(1)
    offers.take_back()
    assert offers.nbytes == 0


def test_what_cannot_be_read_is_said_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "_kernel", fake_kernel)
    library, sink = FakeDriver(), Sink()
    offers = Offers(sink, apart=True, transfer=Transfer(Driver(library)))
    ((page, data),) = made = new(1000)
    offers.copy(made)
    offers.offer(page, data, "")
    library.failing = "cuMemcpyDtoHAsync_v2"
    assert sink.offered[1][1]() is None


def test_elsewhere_what_is_kept_is_lent() -> None:
    sink = Sink(room=5000)
    offers = Offers(sink, apart=False)
    made = new(4000, 6000)
    assert offers.copy(made) == [] and sink.asked == []
    for page, data in made:
        offers.offer(page, data, "")
    assert list(sink.offered) == [1] and offers.nbytes == offers.buffers == 0
    data = sink.offered[1][1]()
    assert data is not None and np.shares_memory(of(made[0][1]), np.frombuffer(data.data, dtype=np.uint8))


def store_of(server: Server) -> PageStore:
    return server.runner._pages


def copies_left(server: Server) -> int:
    """Bytes, when all is written that was offered."""
    assert server.disk is not None and server.disk.settle(20)
    store = store_of(server)
    store.drop(())
    return store.nbytes - store._nbytes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("cuda")
def test_what_went_to_the_disk_as_copies_answers_as_what_is_computed(name: str, disk: PrefixDisk) -> None:
    runner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    server = Server.of(runner, disk=disk)
    server.add(PROMPT)
    most = 0
    while server.scheduler.busy:
        server.step()
        most = max(most, store_of(server).nbytes - store_of(server)._nbytes)
    assert most > 0 == copies_left(server)
    assert disk.stats.writes > 0 == disk.stats.failures + disk.stats.skipped
    server.forget()
    again = server.add([*PROMPT, *words(7, 20)])
    server.finish()
    assert server.wrong(name) == [] and again.cached >= 128
    assert server.scheduler.prefixes.stats.disk_hit_tokens >= 128
    assert copies_left(server) == 0


@pytest.mark.usefixtures("cuda")
def test_a_row_that_fails_leaves_no_copies() -> None:
    """Its pages are not offered, and nobody drops them where it has gone meanwhile. Also where that was known
    before the step landed, as it is of a constraint that gives up."""
    runner, sink = make_runner(solo("llama").model, VOCABULARY, finding("llama").batching)[1], Sink()
    runner.spill(sink)
    offers = runner._pages._offers
    assert offers is not None
    (one, _), (other, _) = made = new(1000, 2000)
    offers.copy(made[:1])
    offers.copy(made[1:])
    runner._land(Flight(1, saves=[Save(7, (one,)), Save(8, (other,))], failed={7: "no"}))
    assert runner._pages.nbytes == 2000 + ALIGNMENT


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_that_the_driver_cannot_copy_are_loaded_all_the_same(
    name: str, disk: PrefixDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Transfer):
        asked = 0

        def filled(self, parts: object) -> list[mx.array]:
            Refusing.asked += 1
            raise DriverError("cuMemcpyHtoDAsync_v2 failed with code 2")

    monkeypatch.setattr(pages_module, "transfer", lambda: Refusing(Driver(FakeDriver())))
    runner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    server = Server.of(runner, disk=disk)
    server.add(PROMPT)
    server.finish()
    server.forget()
    again = server.add([*PROMPT, *words(7, 20)])
    server.finish()
    assert Refusing.asked and again.cached >= 128 and server.wrong(name) == []


def test_who_loads_nothing_needs_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan loads, most of them nothing; finding the way takes a compilation."""
    monkeypatch.setattr(pages_module, "transfer", lambda: pytest.fail("looked for"))
    PageStore().load([])
