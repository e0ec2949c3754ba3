"""The seam to the device's memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from chairlift.engine.memory import device
from chairlift.engine.memory.device import MlxDevice, container_limit, footprint

GIB = 2**30


@pytest.fixture
def bounds() -> Iterator[None]:
    """MLX's own, put back."""
    limit = mx.set_memory_limit(GIB)
    cache = mx.set_cache_limit(GIB)
    yield
    mx.set_memory_limit(limit)
    mx.set_cache_limit(cache)


@pytest.mark.usefixtures("bounds")
def test_freed_buffers_are_kept_up_to_a_bound() -> None:
    MlxDevice().bound(GIB, 10_000)
    kept = mx.ones((100_000,))
    mx.eval(kept)
    del kept
    assert mx.get_cache_memory() <= 10_000
    assert mx.set_memory_limit(GIB) == GIB


def test_the_footprint_grows_with_what_is_touched() -> None:
    before = footprint()
    held = bytearray(b"x" * (64 * 2**20))
    assert footprint() - before > 32 * 2**20
    del held


def test_freed_buffers_go_back_to_the_system() -> None:
    if mx.default_device() != mx.cpu or sys.platform != "linux":
        pytest.skip("of a CPU's allocator on Linux")
    device._give_back_large_buffers()
    mx.clear_cache()
    MlxDevice().tidy()  # so that nothing below fits into what other tests have freed
    before = footprint()
    held = [mx.zeros((size,)) for size in range(40_000, 140_000, 100)]
    mx.eval(held)
    assert footprint() - before > 300 * 2**20
    del held
    mx.clear_cache()
    MlxDevice().tidy()
    assert footprint() - before < 32 * 2**20


@pytest.mark.usefixtures("bounds")
def test_buffers_of_a_step_are_no_new_pages_each_time() -> None:
    if mx.default_device() != mx.cpu or sys.platform != "linux":
        pytest.skip("of a CPU's allocator on Linux")
    MlxDevice().bound(GIB, 0)
    pages, page, times = 2**20 // resource.getpagesize(), np.zeros(2**18, dtype=np.float32), 20
    mx.eval(mx.array(page))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        mx.eval(mx.array(page))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < times * pages / 2


def limit(folder: Path, text: str, name: str = "memory.max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_the_least_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    root = tmp_path / "root"
    limit(root, "max\n")
    limit(root / "outer", f"{2 * GIB}\n")
    limit(root / "outer/inner", "max\n")
    limit(root / "another", f"{GIB}\n")
    assert container_limit([root], own) == 2 * GIB


def test_the_older_form_counts_and_no_limit_is_none(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:memory:/box\n")
    limit(tmp_path / "v1", f"{2**63 - 4096}\n", "memory.limit_in_bytes")
    assert container_limit([tmp_path / "v1"], own) is None
    limit(tmp_path / "v1/box", f"{GIB}\n", "memory.limit_in_bytes")
    assert container_limit([tmp_path / "v1"], own) == GIB
    assert container_limit([tmp_path / "none"], tmp_path / "no such file") is None


def test_a_cpu_leaves_a_share_of_the_container_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("needs the CPU as device")
    monkeypatch.setattr(device, "container_limit", lambda: GIB)
    assert MlxDevice().usable() == int(0.75 * GIB)
