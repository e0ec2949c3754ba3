"""A stand-in for libcuda whose device memory is the host's, and that minds how it is called."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

CONTEXT, STREAM = 0xC0, 0x57
FAULT = 999


@dataclass
class FakeDriver:
    """Copies happen when they are waited for, as late as they may."""

    failing: str = ""
    """A call that fails."""
    calls: list[str] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    """Contexts, by thread."""
    pending: list[tuple[int, int, int]] = field(default_factory=list)

    def _begin(self, name: str) -> int:
        self.calls.append(name)
        return FAULT if name == self.failing else 0

    def cuInit(self, flags: ctypes.c_uint) -> int:
        assert flags.value == 0 and not self.calls
        return self._begin("cuInit")

    def cuDeviceGet(self, device: Any, ordinal: ctypes.c_int) -> int:
        assert ordinal.value == 0
        device._obj.value = 3
        return self._begin("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        assert device.value == 3
        context._obj.value = CONTEXT
        return self._begin("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current[threading.get_ident()] = context.value or 0
        return self._begin("cuCtxSetCurrent")

    def cuStreamCreate(self, stream: Any, flags: ctypes.c_uint) -> int:
        assert flags.value == 1 and self._entered()
        stream._obj.value = STREAM
        return self._begin("cuStreamCreate")

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        assert isinstance(target, ctypes.c_void_p) and isinstance(source, ctypes.c_uint64)
        return self._copy("cuMemcpyDtoHAsync_v2", target, source, size, stream)

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        assert isinstance(target, ctypes.c_uint64) and isinstance(source, ctypes.c_void_p)
        return self._copy("cuMemcpyHtoDAsync_v2", target, source, size, stream)

    def cuStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        assert stream.value == STREAM
        for target, source, size in self.pending:
            ctypes.memmove(target, source, size)
        self.pending.clear()
        return self._begin("cuStreamSynchronize")

    def _copy(self, name: str, target: Any, source: Any, size: ctypes.c_size_t, stream: Any) -> int:
        assert self._entered() and stream.value == STREAM and size.value > 0
        if not (fault := self._begin(name)):
            self.pending.append((target.value, source.value, size.value))
        return fault

    def _entered(self) -> bool:
        return self.current.get(threading.get_ident()) == CONTEXT


def fake_kernel() -> Any:
    """Tells addresses of arrays on the host, in place of the kernel that does it on a device."""

    def told(*, inputs: list[mx.array], **_: Any) -> list[mx.array]:
        (array,) = inputs
        assert array.dtype == mx.uint8 and array.ndim == 1 and array.size
        address = np.frombuffer(memoryview(array), dtype=np.uint8).ctypes.data  # type: ignore[arg-type]
        return [mx.array([address], dtype=mx.uint64)]

    return told
