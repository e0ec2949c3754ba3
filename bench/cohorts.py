"""Which rows should share a cohort, on a CPU: `python bench/cohorts.py`.

Rows below a length, the floor, share a cohort whatever their lengths. By a model of two costs, measured for
heads of several sizes, another floor than the constant would be right: what that floor would bring, and what
each floor brings a decode step of the embedded model, over rows of mixed lengths. Processor time of one core,
the least of several tries, taken in turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from cpu import best
from machine import measured_on
from mlx_lm.models.cache import make_prompt_cache
from results import publish, table, writing_arguments

from chairlift.cache.attention import CohortKV
from chairlift.cache.batch import RowBatch
from chairlift.cache.layout import FLOOR, STEP, CohortLayout, round_up
from chairlift.cache.step import DecodeStep
from chairlift.cache.views import AttendView
from chairlift.engine.blas import find_blas
from chairlift.engine.models.loader import cast_weights, open_model
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.models.strides import lay_out_for_cpu

MIXES = {"8 of 40 to 350": (8, 40, 350), "4 of 40 to 500": (4, 40, 500), "8 of 40 to 900": (8, 40, 900)}
"""How many rows, the shortest and the longest; evenly spread, joined in random order."""
HEADS = ((4, 1, 64), (9, 3, 64), (16, 8, 128), (32, 8, 128))
"""Of queries, of keys, and their size. The second are the embedded model's."""
FLOORS = (64, 256, 512, 1024)
LAYERS = 4
ROWS = 8
ONE = tuple(range(120, 128))
"""Lengths of rows that share a cohort, all unlike, so that there is a mask."""
TWO = (*range(60, 64), *range(188, 192))
"""Of as many rows with as many tokens, padding included, in two cohorts."""
LONG = tuple(range(504, 512))


@dataclass(frozen=True, slots=True)
class CohortCost:
    """Milliseconds, in one attention layer of one decode step.

    Attributes:
        launch: that one more cohort adds.
        token: that one padded token of one row adds.
    """

    launch: float
    token: float

    @property
    def floor(self) -> int:
        """Tokens. Take n rows whose lengths are spread evenly below F, in one cohort. In two, split at F / 2,
        the n / 2 shorter rows would be spared F / 2 tokens of padding each, n F / 4 in all, for one launch
        more. So they belong together up to n F / 4 = launch / token."""
        if self.token <= 0:
            return FLOORS[-1]
        tokens = 4 * self.launch / (ROWS * self.token)
        return round_up(int(min(max(tokens, STEP), FLOORS[-1])))


def cost_of(heads: tuple[int, int, int], rounds: int) -> CohortCost:
    calls = {str(lengths): attention(heads, lengths, 0) for lengths in (ONE, TWO, LONG)}
    one, two, long = best(calls, rounds, time.process_time).values()
    tokens = ROWS * (LONG[-1] - ONE[-1])
    return CohortCost((two - one) / LAYERS, (long - one) / (LAYERS * tokens))


def attention(heads: tuple[int, int, int], lengths: Sequence[int], floor: int) -> Callable[[], mx.array]:
    """The attention of a decode step of rows of these lengths, LAYERS layers."""
    query_heads, kv_heads, dim = heads
    layout = CohortLayout(floor=floor)
    actions = layout.join(enumerate(lengths))
    stores = [CohortKV() for _ in range(LAYERS)]
    for store in stores:
        store.apply(actions)
    queries, keys = (mx.random.normal((len(lengths), count, 1, dim)) for count in (query_heads, kv_heads))
    mx.eval(queries, keys)

    def step() -> mx.array:
        geometry = DecodeStep(layout)
        offset, out = mx.array(list(geometry.lengths), dtype=mx.int32), queries
        for store in stores:
            view = AttendView(store, geometry, offset)
            (new,) = mx.depends([keys], [out])
            view.update_and_fetch(new, new)
            out = view.attend(out, scale=dim**-0.5, mask=None)
        return out

    return step


def lengths_of(count: int, shortest: int, longest: int) -> list[int]:
    lengths = [shortest + (longest - shortest) * row // (count - 1) for row in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def layers(rounds: int) -> Iterator[list[str]]:
    for heads in HEADS:
        cost = cost_of(heads, rounds)
        row = [f"{1e3 * cost.launch:.0f}", f"{1e3 * cost.token:.2f}", str(cost.floor)]
        for mix in MIXES.values():
            floors = {"constant": FLOOR, "measured": cost.floor}
            calls = {name: attention(heads, lengths_of(*mix), floor) for name, floor in floors.items()}
            found = best(calls, rounds, time.process_time)
            row.append(f"{found['measured'] / found['constant']:.2f}")
        yield ["{} / {} of {}".format(*heads), *row]


def steps(model: Any, rounds: int) -> Iterator[list[str]]:
    for name, mix in MIXES.items():
        rows = [caches_of(model, length) for length in lengths_of(*mix)]
        batches = {str(floor): batch_of(model, rows, floor) for floor in FLOORS}
        calls = {floor: partial(decoded, model, batch) for floor, batch in batches.items()}
        found = best(calls, rounds, time.process_time)
        yield [name, *(f"{ms:.0f} ({len(batches[floor].layout.cohorts)})" for floor, ms in found.items())]


def caches_of(model: Any, length: int) -> list[Any]:
    """Of a row whose keys and values are drawn at random."""
    caches: list[Any] = make_prompt_cache(model)
    _, kv_heads, dim = HEADS[1]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, kv_heads, length, dim)) for _ in range(2)))
    mx.eval([cache.state for cache in caches])
    return caches


def batch_of(model: Any, rows: Sequence[list[Any]], floor: int) -> RowBatch:
    batch = RowBatch(make_prompt_cache(model), floor=floor)
    for row, caches in enumerate(rows):
        batch.change(join={row: (caches, caches[0].offset)})
        mx.eval(batch.arrays())
    return batch


def decoded(model: Any, batch: RowBatch) -> mx.array:
    """The logits of the next step."""
    step = batch.begin()
    offsets = mx.array(list(step.lengths), dtype=mx.int32)
    tokens = mx.zeros((len(batch.order), 1), dtype=mx.int32)
    logits: mx.array = model(tokens, cache=batch.caches(step, offsets))
    batch.end()
    return logits


def section(arguments: argparse.Namespace) -> str:
    source = resolve_model(None)
    model, config = open_model(source.folder, source.served_name)
    cast_weights(model, None)
    lay_out_for_cpu(model, config["vocab_size"])
    mx.eval(model.parameters())
    blas = find_blas()
    if blas is not None:
        blas.use(1)
    return "\n\n".join(
        [
            "## Which rows share a cohort, on a CPU",
            f"`python bench/cohorts.py --rounds {arguments.rounds}`; {measured_on(arguments.revision)}",
            "A decode step of the embedded model in float32, rows of mixed lengths: ms of one core, and "
            "cohorts, by the length below which rows share one whatever their lengths.",
            table(("rows", *map(str, FLOORS)), list(steps(model, arguments.rounds))),
            "Attention of one layer by its heads (queries / keys): what a cohort more and a padded token "
            "cost in µs of one core, the length that follows, and its time as a share of that at "
            f"{FLOOR}, the one that is used.",
            table(("heads", "cohort", "token", "length", *MIXES), list(layers(arguments.rounds))),
        ]
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    writing_arguments(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    publish(arguments, "cohorts", section(arguments))


if __name__ == "__main__":
    main()
