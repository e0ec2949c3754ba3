"""Step time of 16 rows with settings of their own against 16 plain rows.

`python bench/settings.py` measures the embedded model and writes the `settings` section of RESULTS.md;
`--shape qwen3-0.6b` a model of that shape with random weights, for a GPU. The sets of rows take turns, round
by round, so that what else the machine does weighs on all; a step's time is the median over all rounds.
On a CPU it is processor time, which does not count what others do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import mlx.core as mx
from decode import decode_times, device, prompts
from device_models import SHAPES, build
from machine import package_version, revision
from results import RESULTS, table, write_section

from chairlift.engine.constraints import Constraint, Json
from chairlift.engine.models.loader import load_model, make_runner
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.plan import NewRow, Runner
from chairlift.engine.request import SamplingParams

ROWS = 16
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


SHAPED = tuple(shaped(row) for row in range(ROWS))
CONSTRAINED = "the first, every second row under a schema"
SETS: dict[str, tuple[SamplingParams, ...]] = {
    "plain, greedy": (SamplingParams(temperature=0),) * ROWS,
    "plain, temperature 0.8": tuple(SamplingParams(temperature=0.8, seed=row) for row in range(ROWS)),
    "penalties, logit_bias, min_tokens, seed, stop": SHAPED,
    CONSTRAINED: SHAPED,
    "the first, logprobs 0 to 5": tuple(shaped(row, logprobs=row % 6) for row in range(ROWS)),
    "the first, top_p and half of them top_k": tuple(
        shaped(row, top_p=0.9 + row / 200, top_k=row % 2 * 20) for row in range(ROWS)
    ),
    "greedy, logprobs 0 to 5": tuple(SamplingParams(temperature=0, logprobs=row % 6) for row in range(ROWS)),
}


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    runner: Runner
    vocab: int
    name: str
    constraint: Constraint | None
    """None where there is no tokenizer."""


@contextmanager
def subject(arguments: argparse.Namespace) -> Iterator[Subject]:
    if arguments.shape is not None:
        shape = SHAPES[arguments.shape]
        _, runner = make_runner(build(shape, mx.bfloat16), shape.vocab_size)
        made = Subject(runner, shape.vocab_size, f"{shape.name}, random bf16 weights", None)
    else:
        source = resolve_model(arguments.model)
        loaded = load_model(source.folder, source.served_name)
        assert loaded.constraints is not None
        constraint = loaded.constraints.compile(Json(SCHEMA), "schema")
        made = Subject(loaded.runner, loaded.tokenizer.vocab_size, source.served_name, constraint)
    try:
        yield made
    finally:
        made.runner.close()


def measure(subject: Subject, arguments: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a step, by set."""
    ids, numbers = count(1), count(1)
    known = prompts(ROWS, arguments.prompt, subject.vocab)
    times: dict[str, list[float]] = {
        name: [] for name in SETS if name != CONSTRAINED or subject.constraint is not None
    }
    for _ in range(arguments.rounds):
        for name, each in times.items():
            rows = [
                NewRow(
                    next(ids),
                    params,
                    params.seed or 0,
                    known=known[row],
                    constraint=subject.constraint if name == CONSTRAINED and row % 2 else None,
                )
                for row, params in enumerate(SETS[name])
            ]
            each += decode_times(subject.runner, rows, arguments.steps, numbers)
    return {name: statistics.median(each) for name, each in times.items()}


def section(subject: Subject, medians: dict[str, float], arguments: argparse.Namespace) -> str:
    greedy, drawn = list(medians.values())[:2]
    which = f" --shape {arguments.shape}" if arguments.shape else ""
    return "\n\n".join(
        [
            f"## Rows with settings of their own: {subject.name}",
            f"`python bench/settings.py{which} --rounds {arguments.rounds} --steps {arguments.steps} "
            f"--prompt {arguments.prompt}`; {device()}, mlx {package_version('mlx')}; "
            f"chairlift {arguments.revision or revision() or 'revision unknown'}.",
            f"The runner's decode step, prompts of {arguments.prompt} tokens, median of all rounds"
            + ("; processor time." if mx.default_device() == mx.cpu else "."),
            table(
                [f"{ROWS} rows", "step ms", "of plain greedy", "of plain drawn"],
                [
                    [name, f"{value:.2f}", f"{value / greedy:.2f}", f"{value / drawn:.2f}"]
                    for name, value in medians.items()
                ],
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder, a GGUF file or a hub name; the embedded model if left out")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=8, help="tokens")
    parser.add_argument("--revision", help="where git does not know it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with subject(arguments) as made:
        text = section(made, measure(made, arguments), arguments)
    write_section(arguments.results, f"settings-{arguments.shape}" if arguments.shape else "settings", text)
    print(text)


if __name__ == "__main__":
    main()
