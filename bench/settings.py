"""Step time of 16 rows with settings of their own against 16 plain rows, on the embedded model.

`python bench/settings.py` writes the `settings` section of RESULTS.md. The sets of rows take turns, round by
round, so that what else the machine does weighs on all of them; a step's time is the median over all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import mlx.core as mx
from machine import machine, package_version, revision
from results import RESULTS, table, write_section

from chairlift.engine.models.loader import load_model
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.plan import NewRow, Runner, Span, StepPlan
from chairlift.engine.request import SamplingParams

ROWS = 16
PLAIN = (SamplingParams(temperature=0),) * ROWS
SEEDED = tuple(SamplingParams(temperature=0.8, seed=row) for row in range(ROWS))


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
SCORED = tuple(SamplingParams(temperature=0, logprobs=row % 6) for row in range(ROWS))
SHAPED_SCORED = tuple(shaped(row, logprobs=row % 6) for row in range(ROWS))
FILTERED = tuple(shaped(row, top_p=0.9 + row / 200, top_k=20 + row) for row in range(ROWS))
SETS: dict[str, tuple[SamplingParams, ...]] = {
    "plain: greedy": PLAIN,
    "plain: temperature 0.8, a seed each": SEEDED,
    "penalties, logit_bias, min_tokens, seed, stop": SHAPED,
    "the same and top_p, top_k": FILTERED,
    "greedy, logprobs 0 to 5": SCORED,
    "penalties and the rest, logprobs 0 to 5": SHAPED_SCORED,
}


class Rows:
    """Sixteen rows on a runner, decoding for ever."""

    def __init__(self, runner: Runner, settings: Sequence[SamplingParams], prompt: int, vocab: int) -> None:
        self._runner = runner
        self._settings = settings
        self._prompts = [
            tuple((7 * row + 31 * place) % vocab for place in range(prompt)) for row in range(len(settings))
        ]
        self._numbers = count(1)

    def measure(self, steps: int, ids: Sequence[int]) -> list[float]:
        """Milliseconds of each step, after the prompts and the first three steps."""
        admit = tuple(
            NewRow(id, params, params.seed or 0, known=prompt if params.counts_tokens else ())
            for id, params, prompt in zip(ids, self._settings, self._prompts, strict=True)
        )
        spans = tuple(Span(id, 0, prompt, True) for id, prompt in zip(ids, self._prompts, strict=True))
        self._step(admit=admit, prefill=spans)
        times: list[float] = []
        for _ in range(steps + 3):
            start = time.perf_counter()
            self._step(decode=tuple(ids))
            times.append((time.perf_counter() - start) * 1000)
        self._step(release=tuple(ids))
        return times[3:]

    def _step(self, **parts: object) -> None:
        result = self._runner.step(StepPlan(next(self._numbers), **parts))  # type: ignore[arg-type]
        assert result is None or not (result.failed or result.lost)


def run(arguments: argparse.Namespace) -> dict[str, float]:
    source = resolve_model(arguments.model)
    loaded = load_model(source.folder, source.served_name)
    ids = count(1)
    rows = {
        name: Rows(loaded.runner, settings, arguments.prompt, loaded.tokenizer.vocab_size)
        for name, settings in SETS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(arguments.rounds):
        for name, each in rows.items():
            times[name] += each.measure(arguments.steps, [next(ids) for _ in range(ROWS)])
    loaded.runner.close()
    return {name: statistics.median(each) for name, each in times.items()}


def section(medians: dict[str, float], arguments: argparse.Namespace) -> str:
    greedy, drawn = list(medians.values())[:2]
    where = machine() if mx.default_device() == mx.cpu else mx.device_info()["device_name"]
    return "\n\n".join(
        [
            "## Rows with settings of their own",
            f"`python bench/settings.py --rounds {arguments.rounds} --steps {arguments.steps} "
            f"--prompt {arguments.prompt}`; {where}, mlx {package_version('mlx')}; "
            f"chairlift {revision() or 'revision unknown'}.",
            f"On {arguments.model or 'the embedded model'}, prompts of {arguments.prompt} tokens; the "
            "runner's decode step, median.",
            table(
                ["16 rows", "step ms", "of greedy", "of drawn"],
                [
                    [name, f"{value:.1f}", f"{value / greedy:.2f}", f"{value / drawn:.2f}"]
                    for name, value in medians.items()
                ],
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder, a GGUF file or a hub name; the embedded model if left out")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    text = section(run(arguments), arguments)
    write_section(arguments.results, "settings", text)
    print(text)


if __name__ == "__main__":
    main()
