"""Bytes past unified memory, with a stand-in for the driver; on a CUDA device, also the real one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from chairlift.cache import transfer as module
from chairlift.cache.transfer import Driver, DriverError, Transfer, number, transfer
from tests.cache.driver import FAULT, FakeDriver, fake_kernel


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a CUDA device, as far as can be seen."""
    monkeypatch.setattr(module, "_kernel", fake_kernel)
    monkeypatch.setattr(module, "on_cuda", lambda: True)
    transfer.cache_clear()
    yield
    transfer.cache_clear()


@pytest.mark.usefixtures("device")
def test_arrays_are_made_of_the_hosts_bytes() -> None:
    library = FakeDriver()
    parts = [bytes(range(256)) * 90, b"", b"x" * 7, bytes(range(255, -1, -1)) * 300]
    arrays = Transfer(Driver(library)).filled([memoryview(part) for part in parts])
    assert [array.dtype for array in arrays] == [mx.uint8] * 4
    assert [bytes(memoryview(array)) if array.size else b"" for array in arrays] == parts
    assert library.calls.count("cuMemcpyHtoDAsync_v2") == 3, "nothing is copied of nothing"


@pytest.mark.usefixtures("device")
def test_any_thread_reads_an_arrays_bytes() -> None:
    found = Transfer(Driver(FakeDriver()))
    array = mx.arange(40_000, dtype=mx.uint32).astype(mx.uint8)
    mx.eval(array)
    address, got = number(found.address(array)), []
    thread = threading.Thread(target=lambda: got.append(found.read(address + 100, 300)))
    thread.start()
    thread.join()
    assert bytes(got[0]) == bytes(np.array(array)[100:400]) and bytes(found.read(address, 0)) == b""


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreate"])
@pytest.mark.usefixtures("device")
def test_a_driver_that_does_not_work_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverError, match=f"{name} failed with code {FAULT}"):
        Driver(FakeDriver(failing=name))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(failing=name))
    assert transfer() is None


@pytest.mark.parametrize(
    "name", ["cuCtxSetCurrent", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"]
)
@pytest.mark.usefixtures("device")
def test_a_copy_that_fails_is_said_and_found_by_the_trial(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeDriver()
    found = Transfer(Driver(library))
    array = mx.zeros((100,), dtype=mx.uint8)
    mx.eval(array)
    address = number(found.address(array))
    library.failing = name
    if name != "cuMemcpyHtoDAsync_v2":
        with pytest.raises(DriverError, match=name):
            found.read(address, 100)
    if name != "cuMemcpyDtoHAsync_v2":
        with pytest.raises(DriverError, match=name):
            found.filled([memoryview(b"x" * 100)])
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(failing=name))
    assert transfer() is None


@pytest.mark.usefixtures("device")
def test_a_library_that_is_not_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        assert name == "libcuda.so.1"
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert transfer() is None


@pytest.mark.usefixtures("device")
def test_bytes_that_come_through_wrong_are_found_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver())
    assert transfer() is not None
    transfer.cache_clear()
    monkeypatch.setattr(Transfer, "read", lambda self, address, size: memoryview(bytes(size)))
    assert transfer() is None


def test_without_a_cuda_device_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the driver asked: it would take some of a GPU's memory."""
    if mx.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("loaded"))
    transfer.cache_clear()
    assert transfer() is None
