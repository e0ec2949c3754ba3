"""Step time of 16 rows with settings of their own against 16 plain rows.

`python bench/settings.py` measures the embedded model and writes the `settings` section of RESULTS.md;
`--shape qwen3-0.6b` a model of that shape with random weights, for a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import decode
from decode import ROWS, Row
from results import table

from chairlift.engine.constraints import Compiler, Json
from chairlift.engine.request import SamplingParams

SCHEMA = '{"type": "array", "items": {"type": "string"}, "minItems": 100}'


def shaped(row: int, **more: float | int) -> SamplingParams:
    """Greedy and drawn rows, each with other penalties and biases."""
    return SamplingParams(
        temperature=row % 4 * 0.4,
        frequency_penalty=0.1 * (row % 5),
        presence_penalty=0.1 * (row % 3),
        repetition_penalty=1.0 + 0.05 * (row % 6),
        logit_bias={100 * row + token: 1.0 for token in range(row)},
        min_tokens=row,
        seed=row,
        stop=(f"stop {row}",),
        **more,  # type: ignore[arg-type]
    )


def sets(compiler: Compiler) -> dict[str, list[Row]]:
    """Greedy and drawn plain rows first: the others are held against them."""
    constraint = compiler.compile(Json(SCHEMA), "schema")
    rows = range(ROWS)
    return {
        "plain, greedy": [(SamplingParams(temperature=0), None) for _ in rows],
        "plain, temperature 0.8": [(SamplingParams(temperature=0.8, seed=row), None) for row in rows],
        "penalties, logit_bias, min_tokens, seed, stop": [(shaped(row), None) for row in rows],
        "the first, every second row under a schema": [
            (shaped(row), constraint if row % 2 else None) for row in rows
        ],
        "the first, logprobs 0 to 5": [(shaped(row, logprobs=row % 6), None) for row in rows],
        "the first, top_p and half of them top_k": [
            (shaped(row, top_p=0.9 + row / 200, top_k=row % 2 * 20), None) for row in rows
        ],
        "greedy, logprobs 0 to 5": [(SamplingParams(temperature=0, logprobs=row % 6), None) for row in rows],
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return decode.parse(__doc__, argv)


def main() -> None:
    arguments = parse()
    with decode.subject(arguments) as subject:
        times = decode.measure(subject, sets(subject.compiler), arguments)
    medians = {name: statistics.median(each) for name, each in times.items()}
    greedy, drawn = list(medians.values())[:2]
    lines = [
        [name, f"{value:.2f}", f"{value / greedy:.2f}", f"{value / drawn:.2f}"]
        for name, value in medians.items()
    ]
    figures = table([f"{ROWS} rows", "step ms", "of plain greedy", "of plain drawn"], lines)
    decode.write("settings", f"Rows with settings of their own: {subject.name}", [figures], arguments)


if __name__ == "__main__":
    main()
