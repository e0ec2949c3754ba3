"""What `chairlift doctor` finds out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from chairlift.cache.mlx_lm_batching import MENDS
from chairlift.engine import doctor
from chairlift.patches import PATCHES, apply_patches, undo_patches


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    undo_patches()
    yield
    undo_patches()
    apply_patches()


def test_versions_device_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_bytes(b"12345")
    found = doctor.examine()
    assert found.versions["mlx"] == version("mlx")
    assert found.versions["chairlift"] == version("chairlift")
    assert (found.cache_folder, found.cache_bytes) == (tmp_path, 5)
    if mx.default_device() == mx.cpu:
        assert found.backend == "CPU"
        assert found.memory_bytes is not None and found.memory_bytes > 2**30


@pytest.mark.parametrize(
    ("needed", "limit"),
    [
        (40, None),  # it may already
        (50, 53760),  # and 5 % more
        (52, 55911),
        (54, None),  # 64 GiB less the system's 8 are not enough
    ],
)
def test_a_wired_limit_that_leaves_the_system_enough(needed: int, limit: int | None) -> None:
    found = doctor.wired_limit_for(needed * 2**30, 48 * 2**30, 64 * 2**30)
    assert found == limit


def test_a_large_machine_keeps_a_share() -> None:
    assert doctor.wired_limit_for(330 * 2**30, 300 * 2**30, 512 * 2**30) is not None
    assert doctor.wired_limit_for(440 * 2**30, 300 * 2**30, 512 * 2**30) is None


def test_a_package_that_is_absent_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    assert doctor.examine().versions == {"no-such-package": None}


def test_every_patch_and_mend_is_listed_with_its_reason() -> None:
    changes = doctor.examine().changes
    assert [change.name for change in changes[: len(PATCHES)]] == [patch.name for patch in PATCHES]
    assert len(changes) == len(PATCHES) + len(MENDS)
    for patch, change in zip(PATCHES, changes, strict=False):
        assert (change.state, change.why) == ("applied", patch.reason)
    assert all(change.why for change in changes)


def test_a_patch_whose_fault_is_gone_is_called_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mended = [replace(p, needed=lambda: False) if p.name == "gemma2" else p for p in PATCHES]
    monkeypatch.setattr(doctor, "PATCHES", tuple(mended))
    (change,) = (change for change in doctor.examine().changes if change.name == "gemma2")
    assert change.needless and not change.ordinary
    assert change.why.endswith(f"(not seen in mlx-lm {version('mlx-lm')}: the patch may be needless)")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the map of a Linux process")
@pytest.mark.parametrize(
    ("mapped", "loaded"),
    [
        ("7f00 r-xp /usr/lib/libopenblas.so.0\n", True),
        ("7f00 r-xp /usr/lib/libblas.so.3\n", False),
        ("7f00 r-xp /site/numpy.libs/libscipy_openblas64_-32a4b2a6.so\n", False),
    ],
)
def test_openblas_is_seen_in_the_process(
    mapped: str, loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(mapped)
    monkeypatch.setattr(doctor, "_MAPS", maps)
    if mx.default_device() == mx.cpu:
        assert doctor.examine().openblas is loaded
