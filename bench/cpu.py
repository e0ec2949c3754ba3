"""What Chairlift does for a CPU, each against how it is without: `python bench/cpu.py`.

- attention without exponentials against MLX's own, one layer of the embedded model's heads
- a forward of few tokens with the model's weights as they come, laid out by columns, and in blocks of columns
- the same by threads of the matrix products, alone and while another process wants a core

The first two are processor time with one thread; all are the best of several tries, taken in turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
from machine import measured_on
from results import publish, table, writing_arguments

from chairlift.cache.cpu_attention import cpu_attention
from chairlift.engine.blas import Blas, find_blas
from chairlift.engine.models.blocks import keep_blocks
from chairlift.engine.models.loader import cast_weights, open_model
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.models.strides import lay_out_for_cpu

HEADS, KV_HEADS, DIM = 9, 3, 64
ATTENTION = {
    "a prompt of 128": (1, 128, 128),
    "a prompt of 512": (1, 512, 512),
    "128 on 896": (1, 128, 1024),
    "64 on 4,032": (1, 64, 4096),
    "6 rows of 700": (6, 1, 700),
    "16 rows of 2,000": (16, 1, 2000),
}
"""Rows, tokens of each and keys."""
TOKENS = (1, 6, 16, 64)
FEW = 6
SPIN = "while True: pass"

Clock = Callable[[], float]


def best(calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of each."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            mx.eval(call())
            found[name] = min(found[name], 1000 * (clock() - start))
    return found


def attention(rounds: int) -> Iterator[list[str]]:
    for name, (rows, tokens, held) in ATTENTION.items():
        shapes = ((rows, HEADS, tokens, DIM), (rows, KV_HEADS, held, DIM), (rows, KV_HEADS, held, DIM))
        arrays = [mx.random.normal(shape, key=mx.random.key(at)) for at, shape in enumerate(shapes)]
        mx.eval(arrays)
        lengths = held - mx.arange(rows)
        mask = "causal" if tokens > 1 else (mx.arange(held) < lengths[:, None])[:, None, None]
        own = partial(mx.fast.scaled_dot_product_attention, *arrays, scale=0.125, mask=mask)
        ours = partial(cpu_attention, *arrays, scale=0.125, mask=mask, known={})
        found = best({"mlx": own, "ours": ours}, rounds, time.process_time)
        yield [name, *(f"{each:.1f}" for each in found.values()), f"{found['mlx'] / found['ours']:.2f}"]


def forward(model: Any, tokens: int) -> mx.array:
    logits: mx.array = model(mx.zeros((1, tokens), dtype=mx.int32))
    return logits


def weights(models: Mapping[str, Any], rounds: int) -> Iterator[list[str]]:
    for tokens in TOKENS:
        calls = {name: partial(forward, model, tokens) for name, model in models.items()}
        rows, columns, blocks = best(calls, rounds, time.process_time).values()
        yield [str(tokens), *(f"{each:.0f}" for each in (rows, columns, blocks)), f"{rows / blocks:.2f}"]


def threads(blas: Blas, model: Any, rounds: int) -> Iterator[list[str]]:
    for count in range(1, blas.threads + 1):
        blas.use(count)
        found = []
        for others in (0, 1):
            with busy(others):
                found += best({"": partial(forward, model, FEW)}, rounds, time.perf_counter).values()
        yield [str(count), *(f"{each:.0f}" for each in found)]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """While so many other processes want a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def section(arguments: argparse.Namespace) -> str:
    blas = find_blas()
    source = resolve_model(None)
    models = {}
    for name in ("rows", "columns", "blocks"):
        models[name], config = open_model(source.folder, source.served_name)
        cast_weights(models[name], None)
    lay_out_for_cpu(models["columns"], config["vocab_size"])
    keep_blocks(models["blocks"], config["vocab_size"])
    for model in models.values():
        mx.eval(model.parameters())
    if blas is not None:
        blas.use(1)
    parts = [
        "## On a CPU",
        f"`python bench/cpu.py --rounds {arguments.rounds}`; {measured_on(arguments.revision)}",
        f"Attention of one layer, {HEADS} query heads of {DIM} over {KV_HEADS}, float32, ms of one core.",
        table(("", "MLX", "without exponentials", "ratio"), list(attention(arguments.rounds))),
        "A forward of the embedded model in float32, ms of one core, by how its weights lie.",
        table(
            ("tokens", "by rows", "by columns", "in blocks", "rows / blocks"),
            list(weights(models, arguments.rounds)),
        ),
    ]
    if blas is not None:
        rows = list(threads(blas, models["rows"], arguments.rounds))
        parts += [
            f"A forward of {FEW} tokens by threads of OpenBLAS, weights by rows, ms by the clock.",
            table(("threads", "alone", "beside a busy process"), rows),
        ]
    return "\n\n".join(parts)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    writing_arguments(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    publish(arguments, "cpu", section(arguments))


if __name__ == "__main__":
    main()
