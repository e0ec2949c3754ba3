"""The sampling tail compiled by mx.compile against the same tail as it is: `python bench/compiled.py`.

The engine does not compile it; this says what that would bring on the machine at hand. Three tails, of the
commonest requests: greedy; temperature; temperature with top_k and top_p. The two take turns. On a CPU the
whole is processor time, which does not count what others do.

- build: the host makes the graph (processor time of its thread)
- whole: until the tokens are there
- first: the first call of one shape, compiling included; by the clock, as mlx runs a compiler for a CPU
- traces: of a compiled function that meets batches of 1 to 32 rows, by exact shapes, by shapes rounded up to
  powers of two, and shapeless
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from machine import measured_on
from results import publish, table, writing_arguments

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling import Draw, row_key, sample
from chairlift.engine.sampling.blocks import at_share, highest
from chairlift.engine.sampling.draw import MOST
from chairlift.engine.sampling.filters import uniform

Tail = Callable[..., tuple[mx.array, mx.array]]
"""Of logits `[rows, vocab]` and the rows' numbers: (tokens, whether the logits are a distribution)."""
HEAT, TOP_P, TOP_K = 0.8, 0.9, 40


def valid(logits: mx.array) -> mx.array:
    return mx.isfinite(logits.max(axis=-1)) & mx.logical_not(mx.isnan(logits.sum(axis=-1)))


def greedy(logits: mx.array, shares: mx.array) -> tuple[mx.array, mx.array]:
    logits = logits.astype(mx.float32)
    return mx.argmax(logits, axis=-1).astype(mx.int32), valid(logits)


def drawn(logits: mx.array, shares: mx.array, heat: mx.array) -> tuple[mx.array, mx.array]:
    logits = logits.astype(mx.float32)
    weights = mx.softmax(logits / heat, axis=-1, precise=True)
    return at_share(weights, mx.minimum(shares, MOST)).astype(mx.int32), valid(logits)


def filtered(
    logits: mx.array, shares: mx.array, heat: mx.array, last: mx.array, top_p: mx.array
) -> tuple[mx.array, mx.array]:
    logits = logits.astype(mx.float32)
    weights = mx.softmax(logits / heat, axis=-1, precise=True)
    _, found = highest(weights, TOP_K)
    weights = weights * (weights >= mx.take_along_axis(found, last, axis=-1))
    share = mx.maximum(top_p, 1e-30)
    enough = mx.cumsum(found, axis=-1) >= share * weights.sum(axis=-1, keepdims=True)
    passed = enough.any(axis=-1, keepdims=True) & (top_p < 1)
    reached = mx.where(passed, mx.argmax(enough, axis=-1, keepdims=True), last)
    weights = weights * (weights >= mx.take_along_axis(found, mx.minimum(reached, last), axis=-1))
    return at_share(weights, mx.minimum(shares, MOST)).astype(mx.int32), valid(logits)


@dataclass(frozen=True)
class Case:
    name: str
    tail: Tail
    numbers: tuple[float, ...]
    """Of each row, in the order of the tail's further arguments."""
    sampling: SamplingParams

    def arguments(self, rows: int, draws: Sequence[Draw]) -> list[mx.array]:
        shares = mx.array([uniform(draw.key, draw.count, b"token") for draw in draws], dtype=mx.float32)
        kinds = [mx.int32 if isinstance(number, int) else mx.float32 for number in self.numbers]
        columns = [mx.array([[n]] * rows, dtype=kind) for n, kind in zip(self.numbers, kinds, strict=True)]
        return [shares, *columns]


CASES = (
    Case("greedy", greedy, (), SamplingParams(temperature=0)),
    Case("temperature", drawn, (HEAT,), SamplingParams(temperature=HEAT)),
    Case(
        "temperature, top_k, top_p",
        filtered,
        (HEAT, TOP_K - 1, TOP_P),
        SamplingParams(temperature=HEAT, top_k=TOP_K, top_p=TOP_P),
    ),
)


def measure(case: Case, rows: int, vocab: int, rounds: int, dtype: mx.Dtype) -> list[str]:
    """A line of the table."""
    on_cpu = mx.default_device() == mx.cpu
    whole_clock = time.process_time_ns if on_cpu else time.perf_counter_ns
    compiled = mx.compile(case.tail)
    build: dict[Tail, list[int]] = {case.tail: [], compiled: []}
    whole: dict[Tail, list[int]] = {case.tail: [], compiled: []}
    first, same, ours = 0.0, 0, 0
    for count in range(rounds + 1):
        logits = (4 * mx.random.normal((rows, vocab))).astype(dtype)
        draws = [Draw(case.sampling, row_key(row), count) for row in range(rows)]
        arguments = [logits, *case.arguments(rows, draws)]
        mx.eval(arguments)
        tokens = []
        for tail in build:
            clock, started, begun = time.perf_counter(), whole_clock(), time.thread_time_ns()
            result = tail(*arguments)
            build[tail].append(time.thread_time_ns() - begun)
            mx.eval(result)
            whole[tail].append(whole_clock() - started)
            tokens.append(result[0].tolist())
            if tail is compiled and not first:
                first = time.perf_counter() - clock
        same += tokens[0] == tokens[1]
        ours += tokens[0] == sample(logits, draws).tokens.tolist()

    def median(times: dict[Tail, list[int]], tail: Tail) -> str:
        return f"{statistics.median(times[tail][1:]) / 1000:,.0f}"

    return [
        f"{case.name}, {rows} rows",
        *(median(build, case.tail), median(build, compiled)),
        *(median(whole, case.tail), median(whole, compiled)),
        f"{first:.2f}",
        f"{same} of {rounds + 1}",
        f"{ours} of {rounds + 1}",
    ]


def traces(case: Case, vocab: int, most: int, *, rounded: bool = False, shapeless: bool = False) -> str:
    """How often a compiled tail is traced over batches of 1 to `most` rows; nothing is computed."""
    count = 0

    def counted(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        nonlocal count
        count += 1
        return case.tail(*arguments)

    compiled = mx.compile(counted, shapeless=shapeless)
    try:
        for rows in range(1, most + 1):
            padded = 1 << (rows - 1).bit_length() if rounded else rows
            draws = [Draw(case.sampling, row_key(row), 0) for row in range(padded)]
            compiled(mx.zeros((padded, vocab)), *case.arguments(padded, draws))
    except ValueError as error:
        return f"refused: {str(error).splitlines()[0][:60]}"
    return str(count)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    writing_arguments(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    dtype = getattr(mx, arguments.dtype)
    lines = [
        measure(case, rows, arguments.vocab, arguments.rounds, dtype)
        for case in CASES
        for rows in arguments.rows
    ]
    counted = [
        [
            case.name,
            traces(case, arguments.vocab, 32),
            traces(case, arguments.vocab, 32, rounded=True),
            traces(case, arguments.vocab, 32, shapeless=True),
        ]
        for case in CASES
    ]
    settings = f"--vocab {arguments.vocab} --rounds {arguments.rounds} --dtype {arguments.dtype}"
    text = "\n\n".join(
        [
            "## The sampling tail, compiled",
            f"`python bench/compiled.py {settings}`; {measured_on(arguments.revision)}",
            "Medians in microseconds; `mx.compile` against the same function as it is. Same: equal tokens of "
            "the two; then of the tail and the engine's own.",
            table(
                ["", "build", "compiled", "whole", "compiled", "first s", "same", "as the engine"],
                lines,
            ),
            table(["traces of 1 to 32 rows", "exact", "powers of two", "shapeless"], counted),
        ]
    )
    publish(arguments, "compiled" if mx.default_device() == mx.cpu else "compiled-gpu", text)


if __name__ == "__main__":
    main()
