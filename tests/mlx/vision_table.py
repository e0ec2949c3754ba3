"""The part of docs/models.md on models that see: every small vision family through its schedule."""

from __future__ import annotations

from importlib.metadata import version

from tests.mlx.parity import Parity
from tests.mlx.vision_families import FAMILIES
from tests.mlx.vision_parity import ALONE, REFUSED, Eyes, finding, measure, rides, seeing_prompt, solo
from tests.mlx.vision_prefix import conversation, seeing_runner

HEAD = """
## Models that see

A folder goes to mlx-vlm {mlx_vlm} where mlx-vlm knows its family and the folder holds a vision tower, or
where mlx-lm does not know it. Its language model runs through the same scheduler, runner and caches; text
rows and rows with images share a batch. An image is encoded in a step of its own, one image a step, while the
others decode; what comes of it is kept by the image's content (up to 256 MiB) and read again by later
prompts. A row with images prefills by itself, chunk by chunk, and decodes with all others, at positions of
its own.

For each family a small random model in float32 takes {rides} rows through one moving batch: text of 1 to 200
tokens, and prompts with one to three images of several sizes, joined in different steps, in chunks that cut
through images, cancelled and preempted. "exact" is held against mlx-vlm's own `generate_step` for each prompt
alone.

"prefixes" says where a later prompt may begin behind kept ones ([prefix-cache.md](prefix-cache.md)). Turns of
a conversation with two images, and the same with another image in one's place, are answered as if nothing had
been kept.

Exact: {exact} of {count} families.

| family | batching | result | images kept by | prefixes | remarks |
|---|---|---|---|---|---|
"""
TAIL = """
In a prompt of gemma3, images are seen as upstream's `generate_step` does it: causally.

Not served with images:

| family | why |
|---|---|
"""


def kept_by(name: str) -> str:
    """What the family's encoded images are kept by, found on a prompt with two that text precedes."""
    family, eyes = FAMILIES[name], Eyes(solo(name).model)
    images = [family.image(1, 2, seed=1), family.image(2, 1, seed=2)]
    eyes.row(*seeing_prompt(family, 3, images, 3)).encode()
    return "image" if eyes.by_image else "prompt"


def prefixes(name: str) -> str:
    """Where later prompts with images may begin, if they are answered as without that."""
    spec = seeing_runner(name)[0].prefix
    if spec is None or not spec.image_tokens:
        return "none"
    if conversation(name).differing:
        return "differs"
    if spec.whole_images:
        return "behind the last image"
    return "from checkpoints" if spec.checkpointed else "to the token"


def row(name: str) -> tuple[str, Parity]:
    """One line of the table, and what it tells."""
    parity = measure(name, rides(FAMILIES[name]))
    result = f"exact, {parity.tokens} tokens" if parity.exact else "differs"
    cells = (name, finding(name).batching, result, kept_by(name), prefixes(name), ALONE.get(name, ""))
    return f"| {' | '.join(cells)} |", parity


def vision_section() -> tuple[str, list[str]]:
    """The section, and the families that are not exact."""
    names = sorted(name for name in FAMILIES if name not in REFUSED)
    lines, wrong = [], []
    for name in names:
        line, parity = row(name)
        print(line, flush=True)
        lines.append(line)
        if not parity.exact:
            wrong.append(name)
    head = HEAD.format(
        mlx_vlm=version("mlx-vlm"),
        rides=len(rides(FAMILIES[names[0]])),
        exact=len(names) - len(wrong),
        count=len(names),
    )
    refused = [f"| {name} | {why} |" for name, why in sorted(REFUSED.items())]
    return head + "\n".join(lines) + "\n" + TAIL + "\n".join(refused) + "\n", wrong
