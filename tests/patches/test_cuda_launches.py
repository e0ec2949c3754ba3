"""What MLX's CUDA backend reads from the environment: set by the loader, and the user's own stands."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import pytest

from chairlift.patches import MLX, apply_patches
from chairlift.patches.cuda_launches import SETTINGS, set_launches, unset_launches


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_patches_for_mlx_set_them() -> None:
    apply_patches((MLX,))
    assert {name: os.environ.get(name) for name in SETTINGS} == SETTINGS
    unset_launches()
    assert not any(name in os.environ for name in SETTINGS)


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "1")
    assert set_launches()
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == "1"
    unset_launches()
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == "1"


CHAINS = """
import os
os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] = "1"
if {patched}:
    from chairlift.patches import apply_patches
    apply_patches()
import mlx.core as mx
for length in range(1, 12):
    x = mx.ones((4,))
    for _ in range(length):
        x = x + 1
    assert x.tolist() == [length + 1.0] * 4
"""


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("patched", [True, False])
def test_graphs_never_seen_before_are_no_error(patched: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CHAINS.format(patched=patched)], capture_output=True, text=True
    )
    assert (run.returncode == 0) is patched, run.stderr
    assert patched or "thrashing" in run.stderr
