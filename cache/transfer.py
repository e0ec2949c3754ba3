"""Bytes between a CUDA device's arrays and the host, past unified memory.

Where the host touches an array, mlx's CUDA backend moves it to unified memory for good (cuda/allocator.cpp,
`move_to_unified_memory`): an allocation, a copy that is waited for, and from then on pages that go back and
forth as they are touched. An array made from the host's bytes begins there. Here the driver copies between
the host's memory and the array's own, which stays on the device.

Sources: CUDA Driver API, "Memory Management", "Primary Context Management", "Stream Management".
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.device import on_cuda

log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream waits for no other."""
_TRIAL = 3 * 16384 + 40
"""Bytes."""


class DriverError(RuntimeError):
    """A call of the driver's failed."""


class Driver:
    """Copies by the CUDA driver, each waited for, on a stream of their own. From any thread.

    Args:
        library: libcuda.

    Raises:
        DriverError, AttributeError: it does not work.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        # The context that the CUDA runtime uses, and so mlx.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._enter()
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(NON_BLOCKING))

    def to_host(self, target: int, source: int, size: int) -> None:
        """Copy `size` bytes from the device's address `source` to the host's address `target`.

        Raises:
            DriverError: it failed.
        """
        addresses = ctypes.c_void_p(target), ctypes.c_uint64(source)
        self._copy("cuMemcpyDtoHAsync_v2", *addresses, size)

    def to_device(self, target: int, source: int, size: int) -> None:
        """Copy `size` bytes from the host's address `source` to the device's address `target`.

        Raises:
            DriverError: it failed.
        """
        addresses = ctypes.c_uint64(target), ctypes.c_void_p(source)
        self._copy("cuMemcpyHtoDAsync_v2", *addresses, size)

    def _copy(self, name: str, target: Any, source: Any, size: int) -> None:
        self._enter()
        self._call(name, target, source, ctypes.c_size_t(size), self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def _enter(self) -> None:
        """Threads begin without a context."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise DriverError(f"{name} failed with code {code}")


class Transfer:
    """
    Args:
        driver: that copies.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def address(self, array: mx.array) -> mx.array:
        """Where the bytes of `array`, uint8 `[bytes]`, are once this is evaluated: uint64 `[1]`. They stay
        there unless the host touches them in another way."""
        return _kernel()(  # type: ignore[no-any-return]
            inputs=[array],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.uint64],
        )[0]

    def read(self, address: int, size: int) -> memoryview:
        """The bytes at an address of the device's, which have been computed. From any thread.

        Raises:
            DriverError: they cannot be copied.
        """
        data = np.empty(size, dtype=np.uint8)
        if size:
            self._driver.to_host(data.ctypes.data, address, size)
        return data.data

    def filled(self, parts: Sequence[memoryview]) -> list[mx.array]:
        """Arrays uint8 `[bytes]` of these bytes, on the device. On the MLX thread.

        Raises:
            DriverError: they cannot be copied.
        """
        arrays = [mx.zeros((part.nbytes,), dtype=mx.uint8) for part in parts]
        addresses = [self.address(array) for array in arrays if array.size]
        # Nobody writes into them any more after this.
        mx.eval(arrays, addresses)
        found = iter(addresses)
        for part in parts:
            if part.nbytes:
                source = np.frombuffer(part, dtype=np.uint8).ctypes.data
                self._driver.to_device(number(next(found)), source, part.nbytes)
        return arrays


def number(address: mx.array) -> int:
    """What `Transfer.address` says, which has been computed. On the MLX thread."""
    return int(address.item())  # type: ignore[arg-type]


@functools.cache
def transfer() -> Transfer | None:
    """The way past unified memory, where there is one and it works: tried once per process, on the MLX
    thread."""
    if not on_cuda():
        return None
    try:
        found = Transfer(Driver(ctypes.CDLL(LIBRARY)))
        if _works(found):
            return found
        log.warning("bytes do not come through between the CUDA device and the host as they are")
    except Exception as error:
        log.info("there is no way past unified memory: %s", error)
    return None


def _works(found: Transfer) -> bool:
    """Bytes come back as they went, from another thread too."""
    sent = np.arange(_TRIAL, dtype=np.uint32).astype(np.uint8)
    (array,) = found.filled([sent.data])
    address = found.address(array)
    mx.eval(address)
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(found.read, number(address) + 16, _TRIAL - 16).result()
    return bytes(got) == bytes(sent[16:]) and bool((array == mx.array(sent)).all().item())


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_address",
        input_names=["array"],
        output_names=["address"],
        source="address[0] = (uint64_t)array;",
    )
