"""Every patch: what it is called, what it mends and in which versions, and whether it is in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from chairlift.patches import (
    attention,
    cpu_silu,
    cuda_launches,
    depthwise_conv,
    gated_delta,
    gemma2,
    llama4,
    longcat_ngram,
    offsets,
    parts,
    phi3small,
    plamo3,
    qwen3_5,
    vlm_positions,
)
from chairlift.patches.probes import attention_takes_arrays_only, gemma2_refuses_batch_masks, plamo3_forgets
from chairlift.patches.replacement import MARK, Replacement

MLX, MLX_LM, MLX_VLM = "mlx", "mlx-lm", "mlx-vlm"


@dataclass(frozen=True, slots=True)
class Patch:
    """
    Attributes:
        name: unique.
        upstream: the distribution that it mends.
        versions: specifier of the versions that it was written for; in others it is not applied.
        reason: what is wrong or missing there.
        apply: put it in place. Idempotent; False where the module it mends is absent.
        undo: put the originals back.
        applied: whether it is in place.
        needed: where a short probe can tell: whether upstream, without the patch, has the fault.
    """

    name: str
    upstream: str
    versions: str
    reason: str
    apply: Callable[[], bool]
    undo: Callable[[], None]
    applied: Callable[[], bool]
    needed: Callable[[], bool] | None = None

    @property
    def installed(self) -> str | None:
        """The version of `upstream` that is installed."""
        try:
            return version(self.upstream)
        except PackageNotFoundError:
            return None

    @property
    def fits(self) -> bool:
        """Whether the installed version is one of those that the patch was written for."""
        return self.installed is not None and SpecifierSet(self.versions).contains(
            self.installed, prereleases=True
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one patch. `why`: one line."""

    patch: Patch
    applied: bool
    why: str


def apply_all(patches: Sequence[Patch], upstreams: Sequence[str]) -> list[Outcome]:
    """Apply those of `patches` that mend `upstreams`, in order; a patch for other versions is left out."""
    return [_apply(patch) for patch in patches if patch.upstream in upstreams]


def undo_all(patches: Sequence[Patch]) -> None:
    """Undo what is applied, last first."""
    for patch in reversed(patches):
        if patch.applied():
            patch.undo()


def _apply(patch: Patch) -> Outcome:
    if patch.installed is None:
        return Outcome(patch, False, f"{patch.upstream} is not installed")
    if not patch.fits:
        return Outcome(patch, False, f"written for {patch.versions}; {patch.installed} is installed")
    if not patch.apply():
        return Outcome(patch, False, f"{patch.upstream} {patch.installed} does not have what it mends")
    return Outcome(patch, True, patch.reason)


def _of(
    name: str,
    versions: str,
    reason: str,
    replacements: Sequence[Replacement],
    upstream: str = MLX_LM,
) -> Patch:
    def apply() -> bool:
        present = [replacement.apply() for replacement in replacements]
        return all(present)

    def undo() -> None:
        for replacement in reversed(replacements):
            replacement.undo()

    def applied() -> bool:
        return all(replacement.applied() for replacement in replacements)

    return Patch(name, upstream, versions, reason, apply, undo, applied)


def _marked(module: str, owner: str, name: str) -> Callable[[], bool]:
    return Replacement(module, owner, name, lambda original: original).applied


def _seam(base: str, upstream: str, versions: str) -> Patch:
    return Patch(
        f"attention seam of {upstream}",
        upstream,
        versions,
        "attention takes arrays only; a batch's keys attend by themselves, cohort by cohort",
        lambda: attention.apply_attention_seam((base,)),
        lambda: attention.undo_attention_seam((base,)),
        _marked(base, "", "scaled_dot_product_attention"),
        lambda: attention_takes_arrays_only(base),
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "launches on cuda",
        MLX,
        cuda_launches.VERSIONS,
        "graphs of operations are made anew in most steps of a moving batch, and misses end in exceptions",
        cuda_launches.set_launches,
        cuda_launches.unset_launches,
        cuda_launches.launches_are_set,
    ),
    _of(
        "silu on a cpu",
        cpu_silu.VERSIONS,
        "exponentials cost the CPU backend tens of products each; SiLU goes without",
        cpu_silu.SILU,
        MLX,
    ),
    _of(
        "depthwise convolutions",
        depthwise_conv.VERSIONS,
        "each new shape is planned for 135 ms on CUDA, and a CPU is slow at them; products are not",
        depthwise_conv.CONVOLUTIONS,
        MLX,
    ),
    _of(
        "gated delta on cuda",
        gated_delta.VERSIONS_LM,
        "the recurrence is computed token by token where there is no Metal; on CUDA one launch takes all",
        gated_delta.LM,
    ),
    _of(
        "gated delta on cuda, mlx-vlm",
        gated_delta.VERSIONS_VLM,
        "the same in its own modules",
        gated_delta.VLM,
        MLX_VLM,
    ),
    _seam("mlx_lm.models.base", MLX_LM, ">=0.32.2,<0.33"),
    _seam("mlx_vlm.models.base", MLX_VLM, ">=0.7.10,<0.8"),
    Patch(
        "gemma2",
        MLX_LM,
        gemma2.VERSIONS,
        "grouped scores have five axes and a batch's mask four; keys are grouped by hand",
        gemma2.patch_gemma2_mask,
        gemma2.undo_gemma2_mask,
        _marked("mlx_lm.models.gemma2", "Attention", "__call__"),
        gemma2_refuses_batch_masks,
    ),
    Patch(
        "plamo3",
        MLX_LM,
        plamo3.VERSIONS,
        "sliding layers keep one token fewer than their mask shows, so answers depend on chunk borders",
        plamo3.patch_plamo3_window,
        plamo3.undo_plamo3_window,
        _marked("mlx_lm.models.plamo3", "Model", "make_cache"),
        plamo3_forgets,
    ),
    _of(
        "latent attention by parts",
        parts.VERSIONS,
        "keys are made from latents in the model; " + ", ".join(module for module, _ in parts.LATENT),
        parts.LATENT_PARTS,
    ),
    _of(
        "chosen keys by parts",
        parts.VERSIONS,
        "an indexer takes the cache's arrays apart; "
        + ", ".join(module for module, _ in (*parts.CHOSEN, *parts.ALONE)),
        parts.CHOSEN_PARTS,
    ),
    _of(
        "cast and tiled keys by parts",
        parts.VERSIONS,
        "keys are cast or tiled before attention; " + ", ".join(module for module, _ in parts.CASTING),
        parts.CASTING_PARTS,
    ),
    _of(
        "positions per row",
        offsets.VERSIONS,
        "positions are made from one integer offset; gpt_bigcode, afm7, ropes of type dynamic",
        offsets.OFFSETS,
    ),
    _of("llama4", llama4.VERSIONS, "one chunk mask and one cache position for all rows", llama4.CHUNKED),
    _of(
        "longcat_flash_ngram",
        longcat_ngram.VERSIONS,
        "token histories of unequal width in a row's first steps",
        longcat_ngram.HISTORY,
    ),
    _of(
        "phi3small",
        phi3small.VERSIONS,
        "a mask that is added instead of applied, and blocks aligned to the end: prefill and decode disagree",
        phi3small.BLOCKS,
    ),
    _of(
        "positions per row of mlx-vlm",
        vlm_positions.VERSIONS,
        "the first row's position scales all (ministral3, mistral4), a long row turns all (longrope)",
        vlm_positions.POSITIONS,
        MLX_VLM,
    ),
    Patch(
        "qwen3_5",
        MLX_VLM,
        ">=0.7.10,<0.7.11",
        "positions and rope deltas kept on the model, device reads in the step",
        qwen3_5.patch_qwen35_attention_for_batching,
        qwen3_5.undo_qwen35_attention_for_batching,
        _marked(qwen3_5.LANGUAGE, "LanguageModel", "__call__"),
    ),
)

__all__ = ["MARK", "MLX", "MLX_LM", "MLX_VLM", "PATCHES", "Outcome", "Patch", "apply_all", "undo_all"]
