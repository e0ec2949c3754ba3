"""Every patch of the registry: applied, reported, undone, and still needed.

`test_without_a_patch_its_families_are_batched_worse` fails for a patch whose fault upstream has mended, and
for a patch that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.models.batching import Finding, find_batching
from chairlift.patches import MLX, MLX_LM, MLX_VLM, PATCHES, Patch, apply_patches, undo_patches
from chairlift.patches.parts import ALONE, CASTING, CHOSEN, LATENT
from chairlift.patches.registry import apply_all
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, build

BY_NAME = {patch.name: patch for patch in PATCHES}
GAINS = {
    "gemma2": ("gemma2",),
    "plamo3": ("plamo3",),
    "latent attention by parts": tuple(module for module, _ in LATENT),
    "chosen keys by parts": tuple(module for module, _ in (*CHOSEN, *ALONE)),
    "cast and tiled keys by parts": tuple(module for module, _ in CASTING),
    "positions per row": ("gpt_bigcode", "internlm3", "afm7"),
    "llama4": ("llama4",),
    "longcat_flash_ngram": ("longcat_flash_ngram",),
    "phi3small": ("phi3small",),
}
"""What patches gain: families that are batched worse without, one for each class that is patched."""
ORDER = (Batching.FLAT, Batching.HYBRID, Batching.ROWS, Batching.DENSE, Batching.SOLO)


@pytest.fixture(autouse=True)
def applied() -> Iterator[None]:
    apply_patches()
    yield
    undo_patches()
    apply_patches()


def found(family: str) -> Finding:
    return find_batching(build(FAMILIES[family]), VOCABULARY)


@pytest.mark.parametrize(
    ("patch", "family"), [(patch, family) for patch, families in GAINS.items() for family in families]
)
def test_without_a_patch_its_families_are_batched_worse(patch: str, family: str) -> None:
    with_it = found(family)
    BY_NAME[patch].undo()
    without = found(family)
    assert ORDER.index(with_it.batching) < ORDER.index(without.batching)
    assert not with_it.whole_prompts


def test_every_patch_is_tried() -> None:
    # test_qwen3_5.py, test_vlm_positions.py, test_cpu_silu.py, test_gated_delta.py,
    # test_depthwise_conv.py, test_cuda_launches.py
    elsewhere = {"qwen3_5", "positions per row of mlx-vlm", "silu on a cpu", "launches on cuda"}
    elsewhere |= {"depthwise convolutions", "gated delta on cuda", "gated delta on cuda, mlx-vlm"}
    probed = {patch.name for patch in PATCHES if patch.needed is not None}
    assert probed | set(GAINS) | elsewhere == set(BY_NAME)


@pytest.mark.parametrize(
    "patch", [patch for patch in PATCHES if patch.needed is not None], ids=lambda p: p.name
)
def test_a_probe_sees_the_fault_upstream_and_not_under_the_patch(patch: Patch) -> None:
    assert patch.needed is not None
    undo_patches()
    assert patch.needed()
    patch.apply()
    assert not patch.needed()


def test_patches_are_undone_whole() -> None:
    undo_patches()
    assert [patch.name for patch in PATCHES if patch.applied()] == []
    outcomes = apply_patches((MLX, MLX_LM, MLX_VLM))
    assert [outcome.patch.name for outcome in outcomes if not outcome.applied] == []
    assert all(patch.applied() for patch in PATCHES)


def test_only_the_upstreams_asked_for_are_patched() -> None:
    undo_patches()
    apply_patches((MLX_LM,))
    assert {patch.upstream for patch in PATCHES if patch.applied()} == {MLX_LM}


def test_a_patch_for_other_versions_is_reported_and_left_out() -> None:
    undo_patches()
    gemma2 = BY_NAME["gemma2"]
    (outcome,) = apply_all([replace(gemma2, versions="<0.32")], (MLX_LM,))
    assert not outcome.applied and not gemma2.applied()
    assert outcome.why.startswith("written for <0.32; 0.32.")


def test_a_patch_of_a_package_that_is_absent_is_reported() -> None:
    (outcome,) = apply_all([replace(BY_NAME["gemma2"], upstream="no-such-package")], ("no-such-package",))
    assert not outcome.applied
    assert outcome.why == "no-such-package is not installed"


def test_a_patch_of_a_module_that_is_absent_is_reported() -> None:
    (outcome,) = apply_all([replace(BY_NAME["gemma2"], apply=lambda: False)], (MLX_LM,))
    assert not outcome.applied
    assert outcome.why.endswith("does not have what it mends")
