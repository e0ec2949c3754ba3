"""Step time of 16 rows under a JSON Schema against 16 plain rows.

`python bench/constraints.py` measures the embedded model and writes the `constraints` section of RESULTS.md;
`--shape qwen3-0.6b` a model of that shape with random weights and a vocabulary made up to its size, for a
GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import decode
from decode import ROWS
from results import table

from chairlift.engine.constraints import Constraint, Json
from chairlift.engine.constraints.matcher import MaskFiller, Matcher
from chairlift.engine.request import SamplingParams

SCHEMA = """{"type": "array", "minItems": 1000, "items": {"type": "object", "properties": {
  "name": {"type": "string"}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"enum": ["a", "b"]}}
}, "required": ["name", "age", "tags"], "additionalProperties": false}}"""
"""No answer comes to its end."""
SETS = {"plain": 0, "one under the schema": 1, "8 under the schema": 8, "all under the schema": ROWS}


def fills(constraint: Constraint, rounds: int) -> list[float]:
    """Milliseconds to fill 16 masks, each row one random token further every time."""
    draw = random.Random(1)
    matchers: list[Matcher | None] = [constraint.compiled.matcher() for _ in range(ROWS)]
    filler = MaskFiller()
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        bits = filler.fill(matchers)
        times.append((time.perf_counter() - start) * 1000)
        for row, matcher in enumerate(matchers):
            assert matcher is not None
            words = [word for word, value in enumerate(bits[row]) if value]
            word = draw.choice(words)
            value = int(bits[row, word]) & 0xFFFFFFFF
            matcher.advance(word * 32 + draw.choice([bit for bit in range(32) if value >> bit & 1]))
    return times


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return decode.parse(__doc__, argv)


def main() -> None:
    arguments = parse()
    drawn = SamplingParams(temperature=0.8)
    with decode.subject(arguments) as subject:
        constraint = subject.compiler.compile(Json(SCHEMA, compact=True), "schema")
        sets = {
            name: [(drawn, constraint if row < constrained else None) for row in range(ROWS)]
            for name, constrained in SETS.items()
        }
        times = decode.measure(subject, sets, arguments)
        masks = fills(constraint, 100)
    medians = {name: statistics.median(each) for name, each in times.items()}
    lines = [[name, f"{value:.2f}", f"{value / medians['plain']:.2f}"] for name, value in medians.items()]
    parts = [
        table([f"{ROWS} rows, temperature 0.8", "step ms", "of plain"], lines),
        f"Filling {ROWS} masks: {statistics.median(masks):.2f} ms, at most {max(masks):.2f} ms.",
    ]
    decode.write("constraints", f"Rows under a schema: {subject.name}", parts, arguments)


if __name__ == "__main__":
    main()
