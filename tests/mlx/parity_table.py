"""`make parity`: every family through the full schedule, into docs/models.md.

Exits with 1 if any family's answer is not exactly its solo answer. Names as arguments limit the run to these
families and print the rows instead of writing the file.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from pathlib import Path

from chairlift.engine.batching import Batching
from chairlift.patches import MLX_LM, PATCHES
from tests.mlx.families import COARSE, FAMILIES, MENDED, NOT_BUILT, NOT_ON_CPU, ONE_BY_ONE
from tests.mlx.parity import Parity, finding, measure
from tests.mlx.schedules import FULL
from tests.mlx.uses import section
from tests.mlx.vision_table import vision_section

TARGET = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """\
# Models

Chairlift serves the model families that mlx-lm {mlx_lm} loads. How the rows of a family share a step is found
when a model is loaded, by a trial on the model itself: from the fastest way to the slowest, the first whose
logits equal those of solo runs is taken. `chairlift serve` prints it.

| batching | how a step is computed |
|---|---|
| flat | One forward over all tokens of the step; attention per cohort of rows of similar length. |
| hybrid | Prefill chunks one prompt at a time, then one forward over all decoding rows, states stacked. |
| dense | As hybrid, keys of all rows in one padded block. |
| rows | As flat, but attention runs row by row, on caches of each row's own. |
| solo | Every row by itself, one forward after the other: slower with many rows, never wrong. |

## Parity

Written by `make parity` with mlx {mlx} and mlx-lm {mlx_lm}. For each family a small random model in float32
takes {rides} rows of 1 to 420 tokens through one moving batch: joining in the same and in different steps,
prefilled in chunks of many sizes, cancelled in mid-prefill and mid-decode, preempted and started again.
"exact" means that every token is the one that mlx-lm's own `generate_step` draws for the prompt alone, and
that its log probability is within 1e-4; a tie (two candidates within 1e-5) may go either way.

Exact: {exact} of {count} families. Served one row at a time: {solo}.

| family | batching | result | remarks |
|---|---|---|---|
"""

TAIL = """
Other names that a configuration may carry (`model_type`) are mapped by mlx-lm onto these families: mistral,
iquestcoder and xverse are llama, falcon_mamba is mamba, kimi_k2 and joyai_llm_flash are deepseek_v3,
qwen2_5_vl is qwen2_vl, minimax_m2 is minimax, phi-msft is phixtral, llava is mistral3, gemma4_unified is
gemma4.

## Patches

What mlx-lm's code takes for granted of a single request, and what Chairlift puts in its place when a model
is loaded (`chairlift doctor` lists them too). The solo runs above are upstream's own code, without any patch,
but for the families whose remark says that upstream's answer is not well defined.

| patch | versions of mlx-lm | what it is for |
|---|---|---|
{patches}
{uses}
## Not tried

| family | why |
|---|---|
"""


def result_of(parity: Parity) -> str:
    if parity.failures:
        return "fails: " + next(iter(parity.failures.values()))
    if parity.exact:
        return f"exact, {parity.tokens} tokens"
    first = parity.differences[0] if parity.differences else None
    return f"differs at gap {first.gap:.0e}" if first is not None else "incomplete"


def remarks(name: str) -> str:
    parts = [table[name] for table in (ONE_BY_ONE, MENDED) if name in table]
    if name in COARSE:
        parts.append(
            f"rounds keys to 8 and 4 bits as it runs, and noise in float32 can flip a step of that: held to "
            f"{COARSE[name]} in log probability"
        )
    return "; ".join(parts)


def row(name: str) -> tuple[str, Parity]:
    batching = finding(name).batching
    parity = measure(name, FULL)
    return f"| {name} | {batching} | {result_of(parity)} | {remarks(name)} |", parity


def main(names: list[str]) -> int:
    # The trial's refusals are logged as errors of steps; the table tells their outcome.
    logging.disable(logging.CRITICAL)
    chosen = names or sorted((name for name in FAMILIES if name not in NOT_ON_CPU), key=str.lower)
    lines, wrong = [], []
    for name in chosen:
        line, parity = row(name)
        print(line, flush=True)
        lines.append(line)
        if not parity.exact:
            wrong.append(name)
    if not names:
        alone = sum(finding(name).batching is Batching.SOLO for name in chosen)
        head = HEAD.format(
            mlx=version("mlx"),
            mlx_lm=version("mlx-lm"),
            rides=len(FULL),
            exact=len(chosen) - len(wrong),
            count=len(chosen),
            solo=alone,
        )
        untried = [f"| {name} | {why} |" for name, why in sorted({**NOT_BUILT, **NOT_ON_CPU}.items())]
        patches = [
            f"| {patch.name} | {patch.versions} | {patch.reason} |"
            for patch in PATCHES
            if patch.upstream == MLX_LM
        ]
        tail = TAIL.format(patches="\n".join(patches), uses=section())
        seeing, wrong_seeing = vision_section()
        wrong += wrong_seeing
        TARGET.write_text(head + "\n".join(lines) + "\n" + seeing + tail + "\n".join(untried) + "\n")
    if wrong:
        print("not exact: " + ", ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
