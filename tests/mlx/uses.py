"""What becomes of every family that the search finds: integer use of offsets, and state kept on modules.

The outcome is for text and vision as Chairlift calls the models: with each row's own positions told, under
its patches, or row by row.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.mlx.offsets import PACKAGES, search

SETUP = "weights or layer numbers made once, the same for every request"
MENDED = "patched: every row its own positions"
TOLD = "positions and deltas are told at every call, row by row, so what the model keeps is never read"
OTHER = "made for other tasks than answering token by token: not tried"
KEEPS = "keeps more of a request on itself than positions: not looked into, not to be relied on"
CHECKED = (
    "reads the device or the first row; the trial at loading decides, one row at a time where it differs"
)

OUTCOMES: dict[tuple[str, str], str] = {
    ("mlx_lm", "bailing_hybrid"): SETUP,
    ("mlx_lm", "deepseek_v41"): "its caches hold one position for all rows: one row at a time",
    ("mlx_lm", "gpt_bigcode"): MENDED,
    ("mlx_lm", "internlm3"): "a class that nothing uses; its rope is that of rope_utils",
    ("mlx_lm", "kimi_k3"): SETUP,
    ("mlx_lm", "llama4"): "patched: attention row by row, on each row's own chunked cache",
    ("mlx_lm", "longcat_flash_ngram"): SETUP,
    ("mlx_lm", "plamo3"): SETUP,
    ("mlx_lm", "rope_utils"): "ropes of type dynamic (internlm3 and others). " + MENDED,
    ("mlx_lm", "switch_layers"): SETUP,
    ("mlx_vlm", "cohere_compass"): CHECKED,
    ("mlx_vlm", "deepseek_v41"): "its caches hold one position for all rows: one row at a time",
    ("mlx_vlm", "diffusion_gemma"): OTHER,
    ("mlx_vlm", "ernie4_5_moe_vl"): TOLD,
    ("mlx_vlm", "falcon_ocr"): CHECKED,
    ("mlx_vlm", "falcon_perception"): KEEPS,
    (
        "mlx_vlm",
        "gemma4",
    ): "in steps of several tokens only, which are one row's",
    ("mlx_vlm", "gemma4_unified"): SETUP,
    ("mlx_vlm", "glm4v"): TOLD,
    ("mlx_vlm", "glm4v_moe"): TOLD,
    ("mlx_vlm", "glm_ocr"): TOLD,
    ("mlx_vlm", "gpt_bigcode"): CHECKED,
    ("mlx_vlm", "granite4_vision"): "features of a prompt's chunk; decode rows do not read it",
    ("mlx_vlm", "hrm_text"): CHECKED,
    ("mlx_vlm", "hunyuan_vl"): CHECKED,
    ("mlx_vlm", "indic_ocr"): KEEPS,
    ("mlx_vlm", "inkling"): SETUP,
    ("mlx_vlm", "internlm2"): CHECKED,
    ("mlx_vlm", "internlm3"): CHECKED,
    ("mlx_vlm", "jina_vlm"): CHECKED,
    ("mlx_vlm", "kimi_k25"): SETUP,
    ("mlx_vlm", "kimi_k3"): SETUP,
    ("mlx_vlm", "limite"): CHECKED,
    ("mlx_vlm", "llama4"): CHECKED,
    ("mlx_vlm", "locateanything"): CHECKED,
    ("mlx_vlm", "longcat_flash_ngram"): SETUP,
    ("mlx_vlm", "longcat_flash_sparse"): SETUP,
    ("mlx_vlm", "minicpmo"): SETUP,
    ("mlx_vlm", "minicpmv4_6"): SETUP,
    ("mlx_vlm", "minimax_h3"): OTHER,
    ("mlx_vlm", "minimax_m3_vl"): TOLD,
    ("mlx_vlm", "mistral3"): MENDED,
    ("mlx_vlm", "mistral4"): MENDED,
    ("mlx_vlm", "mllama"): CHECKED,
    ("mlx_vlm", "molmo_point"): KEEPS,
    ("mlx_vlm", "nemotron_labs_diffusion"): OTHER,
    ("mlx_vlm", "nemotron_voicechat"): OTHER,
    ("mlx_vlm", "paddleocr_vl"): TOLD,
    ("mlx_vlm", "paligemma"): CHECKED,
    ("mlx_vlm", "phi4mm"): KEEPS,
    ("mlx_vlm", "qwen2_5_vl"): TOLD,
    ("mlx_vlm", "qwen2_vl"): TOLD,
    ("mlx_vlm", "qwen3_5"): "patched: every row its own positions and delta, nothing kept on the model",
    ("mlx_vlm", "qwen3_omni_moe"): TOLD,
    ("mlx_vlm", "qwen3_vl"): TOLD,
    ("mlx_vlm", "qwen3_vl_moe"): TOLD,
    ("mlx_vlm", "qwen4_exp"): CHECKED,
    ("mlx_vlm", "rope_utils"): "longrope (phi3, phi3_v, phimoe, minicpm3). " + MENDED,
    ("mlx_vlm", "sam3d_objects"): OTHER,
    ("mlx_vlm", "sapiens2"): OTHER,
    ("mlx_vlm", "step3p7"): SETUP,
    ("mlx_vlm", "z1t"): OTHER,
    ("mlx_vlm", "zaya1_vl"): CHECKED,
}


@cache
def lines() -> tuple[str, ...]:
    """Every use as a line of the kept list: package, family, kind and source, sorted."""
    found = {(use.package, use.family, use.kind, use.what) for package in PACKAGES for use in search(package)}
    return tuple("\t".join(use) for use in sorted(found))


def section() -> str:
    """The section of `docs/models.md`."""
    kinds: dict[tuple[str, str], set[str]] = {}
    for line in lines():
        package, family, kind, what = line.split("\t")
        name = what if kind == "state" else kind
        kinds.setdefault((package, family), set()).add(f"`{name.removeprefix('self.')}`")
    versions = " and ".join(f"{name} {version(name)}" for name in ("mlx-lm", "mlx-vlm"))
    rows = [
        f"| {key[0].replace('_', '-')} | {key[1]} | {', '.join(sorted(found))} | {OUTCOMES[key]} |"
        for key, found in sorted(kinds.items())
    ]
    return SECTION.format(versions=versions) + "\n".join(rows) + "\n"


SECTION = """
## Offsets as one integer, and state kept on modules

In a batch every row has its own position, so `cache.offset` is an array; and what a module keeps of its last
call belongs to another request in the next. `tests/mlx/offsets.py` searches the model files of
{versions} for code that slices, counts or decides by an offset, and for attributes that are
set after a module is built. Every other family has none. Where the trial at loading decides, it does so over
short rows: what depends on greater lengths is patched.

| package | family or file | found | what becomes of it |
|---|---|---|---|
"""

if __name__ == "__main__":
    Path(__file__).with_name("uses.txt").write_text("\n".join(lines()) + "\n")
