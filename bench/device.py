"""Decoding on one accelerator with random weights of real shapes: `python bench/device.py`.

Needs mlx, mlx-lm and this tree on the path (`PYTHONPATH=src`), no network and no server packages; see
bench/device.md for a machine that has nothing but wheels. Measures

- throughput: tok/s of the bare model step, of our runner and engine, and of mlx-lm's BatchGenerator on the
  same work, in the steady state (all rows decode) and with joins;
- lengths: step time and KV bytes of 28 short rows beside three of 4k and one of 32k tokens.

Writes device.json to --out (or $OUT) after every part, so that what was measured survives whatever comes
after it, and prints it as a table at the end. A part that fails says so and the others go on. `--tiny` tries
the script itself on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from device_models import SHAPES, TINY_SHAPES, RowBytes, Shape, build, parameter_bytes, row_bytes
from device_paths import (
    Deadline,
    Steps,
    bare,
    batch_generator,
    engine,
    equal_caches,
    filled_rows,
    ours,
    ours_filled,
    padded_caches,
)
from device_report import device_section
from device_work import Work, generator_work, joins_work, steady_work, unequal_work
from machine import package_version, revision

from chairlift.engine.models.build import make_runner
from chairlift.engine.models.warm import warm_up
from chairlift.patches.cuda_launches import set_launches

PATHS = ("bare", "unmasked", "ours", "engine", "sampled", "batch_generator")
"""`ours` is scheduler and runner without event loop and text; `sampled` the same with temperature, top_p."""
LENGTH_PATHS = ("ours", "ours_filled", "padded", "batch_generator")
"""The decode step of rows that begin with caches filled at random (`ours_filled` and `batch_generator`;
`padded` is mlx-lm's bare step over its left-padded cache), or that were prefilled (`ours`)."""
SHORT_ROWS = 28
LONG = (4096, 4096, 4096, 32768)
SPREAD = tuple(round(100 * 80 ** (index / 31)) for index in range(32))
"""Tokens of 32 rows from 100 to 8,000, evenly on a logarithmic scale."""
LENGTH_ROWS = ("short", "long", "spread")
MEMORY_SHARE = 0.92
"""Of the device's memory that a part may plan to use."""

Entry = dict[str, Any]


class Bench:
    """One run: the model at hand, the time left, and what was measured so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.tiny: bool = arguments.tiny
        self.dtype = mx.float32 if self.tiny else mx.bfloat16
        self.prompt = 12 if self.tiny else 128
        self.steps = 8 if self.tiny else 64
        self.budget = 32 if self.tiny else arguments.budget
        self.limit = Deadline(arguments.seconds)
        self.result: Entry = {
            "machine": machine(arguments.revision),
            "arguments": shlex.join(sys.argv[1:]),
            "models": [],
            "throughput": [],
            "lengths": [],
        }

    def run(self) -> None:
        shapes = TINY_SHAPES if self.tiny else SHAPES
        for name in self.arguments.models:
            self._tidy()
            started = time.perf_counter()
            try:
                shape = shapes[name]
                model = build(shape, self.dtype)
                need = row_bytes(model)
            except Exception as error:
                self._failed("throughput", {"model": name, "batch": 0, "path": "build"}, error)
                continue
            self.result["models"].append(
                {
                    "model": name,
                    "weight_bytes": parameter_bytes(model),
                    "kv_bytes_per_token": need.per_token,
                    "state_bytes_per_row": need.states,
                    "build_s": time.perf_counter() - started,
                }
            )
            say(f"{name}: {parameter_bytes(model) / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")
            if "lengths" in self.arguments.parts:
                self._lengths(shape, model, need)
            if "throughput" in self.arguments.parts:
                self._throughput(shape, model)
            del model
        self._save()

    # Throughput

    def _throughput(self, shape: Shape, model: nn.Module) -> None:
        for batch in self.arguments.batches:
            for path in self.arguments.paths:
                entry: Entry = {"model": shape.name, "batch": batch, "path": path}
                self._part("throughput", entry, partial(self._measure, shape, model, entry))

    def _measure(self, shape: Shape, model: nn.Module, entry: Entry) -> None:
        rows, path, vocab = entry["batch"], entry["path"], shape.vocab_size
        joins: Steps | None = None
        if path in ("bare", "unmasked"):
            caches = equal_caches(model, rows, self.prompt, masked=path == "bare")
            steady = bare(model, caches, rows, self.steps, self._deadline())
        else:
            work = steady_work(rows, self.prompt, self.steps, self.budget, vocab)
            more = joins_work(rows, self.prompt, vocab)
            if path == "batch_generator":
                work = generator_work(rows, self.prompt, self.steps // 2, vocab)
                steady = batch_generator(model, work, rows, self._deadline())
                joins = batch_generator(model, more, rows, self._deadline())
            elif path == "engine":
                make = self._runner_maker(model, vocab, entry)
                steady = asyncio.run(engine(make, vocab, work, rows, self.budget, self._deadline()))
                joins = asyncio.run(engine(make, vocab, more, rows, self.budget, self._deadline()))
            else:
                runner = self._runner_maker(model, vocab, entry)()
                sampled = path == "sampled"
                steady = ours(runner, work, rows, self.budget, self._deadline(), sampled=sampled)
                if not sampled:
                    joins = ours(runner, more, rows, self.budget, self._deadline())
                runner.close()
        entry["steady_tok_s"] = steady.steady_tokens_per_s(rows)
        entry["step_ms_p50"] = steady.step_ms
        entry["steady_steps"] = len(steady.seconds)
        entry["cut"] = steady.cut or (joins is not None and joins.cut)
        if joins is not None:
            entry["joins_tok_s"] = joins.tokens_per_s
            entry["joins_wall_s"] = joins.wall
            entry["joins_tokens"] = joins.drawn

    def _runner_maker(self, model: nn.Module, vocab: int, entry: Entry) -> Callable[[], Any]:
        def make() -> Any:
            finding, runner = make_runner(model, vocab)
            warm_up(runner, vocab)
            entry["batching"] = str(finding.batching)
            entry["batching_reasons"] = [f"{kind}: {reason}" for kind, reason in finding.reasons]
            return runner

        return make

    # Unequal lengths

    def _lengths(self, shape: Shape, model: nn.Module, need: RowBytes) -> None:
        scale = 32 if self.tiny else 1
        short = [(100 + (index * 173) % 501) // scale + 1 for index in range(SHORT_ROWS)]
        long = [length // scale for length in LONG]
        spread = [length // scale + 1 for length in SPREAD]
        cases = {
            "short": ("28 short", short),
            "long": ("28 short, 3×4k, 1×32k", short + long),
            "spread": ("32 of 100 to 8,000", spread),
        }
        for rows, lengths in (cases[name] for name in self.arguments.length_rows):
            for path in self.arguments.length_paths:
                entry: Entry = {"model": shape.name, "rows": rows, "path": path}
                measure = partial(self._measure_lengths, shape, model, need, lengths, entry)
                self._part("lengths", entry, measure)

    def _measure_lengths(
        self, shape: Shape, model: nn.Module, need: RowBytes, lengths: list[int], entry: Entry
    ) -> None:
        steps = self.steps // 2
        mx.reset_peak_memory()
        if path_is_padded := entry["path"] == "padded":
            room = steps + 8
            planned = need.of([max(lengths) + room] * len(lengths))
            entry["kv_bytes"], entry["need_bytes"] = planned, need.of(lengths)
            available = MEMORY_SHARE * memory_bytes() - parameter_bytes(model)
            if planned > available:
                raise MemoryError(
                    f"the padded cache needs {planned / 1e9:.0f} GB of {available / 1e9:.0f} GB left"
                )
            caches = padded_caches(model, lengths, self.dtype, room)
            timed = bare(model, caches, len(lengths), steps, self._deadline())
        elif entry["path"] == "batch_generator":
            joining = -(-len(lengths) // 8) + 2 * len(lengths)
            work = Work([[1]] * len(lengths), [joining + steps] * len(lengths))
            filled = filled_rows(model, lengths, self.dtype)
            timed = batch_generator(model, work, len(lengths), self._deadline(), filled)
        elif entry["path"] == "ours_filled":
            runner = self._runner_maker(model, shape.vocab_size, entry)()
            filled = filled_rows(model, lengths, self.dtype)
            timed = ours_filled(runner, filled, lengths, steps, self._deadline())
            runner.close()
            if timed.at_full is not None:
                entry["kv_bytes"] = timed.at_full.kv_bytes
                entry["need_bytes"] = need.of(lengths)
        else:
            budget = self.budget if self.tiny else 4 * self.budget
            runner = self._runner_maker(model, shape.vocab_size, entry)()
            work = unequal_work(lengths, steps, budget, shape.vocab_size)
            timed = ours(runner, work, len(lengths), budget, self._deadline())
            runner.close()
            if timed.at_full is not None:
                entry["kv_bytes"] = timed.at_full.kv_bytes
                entry["kv_tokens_bytes"] = timed.at_full.kv_tokens_bytes
                entry["need_bytes"] = need.of(timed.lengths)
        entry["step_ms_p50"] = timed.step_ms
        entry["steady_steps"] = len(timed.seconds)
        entry["cut"] = timed.cut
        entry["peak_bytes"] = mx.get_peak_memory()
        if not path_is_padded:
            entry["prefill_and_decode_s"] = timed.wall

    # Parts

    def _part(self, kind: str, entry: Entry, measure: Callable[[], None]) -> None:
        if self.limit.passed:
            self._failed(kind, entry, TimeoutError("skipped: the run's time is over"))
            return
        self._tidy()
        started = time.perf_counter()
        try:
            measure()
        except Exception as error:
            self._failed(kind, entry, error)
            return
        entry["part_s"] = time.perf_counter() - started
        self.result[kind].append(entry)
        say(json.dumps(entry))
        self._save()

    def _failed(self, kind: str, entry: Entry, error: Exception) -> None:
        if not isinstance(error, (TimeoutError, MemoryError)):
            traceback.print_exception(error)
        entry["error"] = (str(error) or type(error).__name__).splitlines()[0][:200]
        self.result[kind].append(entry)
        say(json.dumps(entry))
        self._save()

    def _deadline(self) -> Deadline:
        return Deadline(self.arguments.part_seconds)

    def _tidy(self) -> None:
        gc.collect()
        mx.clear_cache()

    def _save(self) -> None:
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        (self.arguments.out / "device.json").write_text(json.dumps(self.result, indent=1) + "\n")


def machine(commit: str | None) -> dict[str, Any]:
    """The device and the versions, and nothing that names the machine."""
    info = mx.device_info()
    name = str(info.get("device_name") or "")
    known = {name: package_version(name) for name in ("mlx", "mlx-lm")}
    versions = ", ".join(f"{package} {number}" for package, number in known.items())
    return {
        "device": name or ("CPU" if mx.default_device() == mx.cpu else "GPU"),
        "memory_bytes": memory_bytes(),
        "versions": f"{versions}, Python {platform.python_version()}",
        "revision": revision(commit),
    }


def memory_bytes() -> int:
    """Of the device; of the machine where the device shares its memory."""
    info = mx.device_info()
    for key in ("memory_size", "total_memory", "max_recommended_working_set_size"):
        if info.get(key):
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def say(text: str) -> None:
    print(text, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--parts", nargs="+", choices=["throughput", "lengths"], default=["throughput", "lengths"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--length-paths", nargs="+", choices=LENGTH_PATHS, default=list(LENGTH_PATHS))
    parser.add_argument("--length-rows", nargs="+", choices=LENGTH_ROWS, default=list(LENGTH_ROWS))
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step (x4 where lengths differ)")
    parser.add_argument("--seconds", type=float, default=450.0, help="no part starts after so many")
    parser.add_argument("--part-seconds", type=float, default=20.0, help="a timed loop is cut there")
    parser.add_argument("--revision", help="the commit measured, where git does not know it")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script on a CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."))
    arguments = parser.parse_args(argv)
    if arguments.tiny and arguments.batches == [1, 32, 128]:
        arguments.batches = [1, 2, 4]
    return arguments


def main() -> int:
    set_launches()  # as a server has them, for all paths; MLX's own default is MLX_USE_CUDA_GRAPHS=1
    bench = Bench(parse())
    bench.run()
    say(device_section(bench.result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
