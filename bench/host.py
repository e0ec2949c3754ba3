"""What a decode step costs the host: `python bench/host.py`.

The whole engine over a llama of many layers that are tiny, so that the device has little to do. Each part's
processor time is that of the thread it runs on, and a part's own: what it calls is counted where it is listed
itself. So neither the device's work (other threads) nor other work on the machine shows.

- model graph: mlx builds the forward, attention and the rows' caches included; not ours to cut
- dispatch: mlx hands the step to the device
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import mlx.core as mx
from device_models import build, llama
from machine import measured_on
from results import publish, table, writing_arguments

from chairlift.engine import draws
from chairlift.engine.answers import Answers
from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.events import Finished
from chairlift.engine.flight import Flight
from chairlift.engine.memory.device import MlxDevice
from chairlift.engine.models.loader import make_runner
from chairlift.engine.models.quantization import cache_factory
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.models.sizes import measure_states
from chairlift.engine.models.tokenizer import load_tokenizer
from chairlift.engine.plan import LoadedModel, ModelInfo
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.residents import Residents
from chairlift.engine.runner import MlxRunner
from chairlift.engine.scheduler import Scheduler
from chairlift.engine.text import AnswerText

PROMPT = 16
"""Tokens."""
SETS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p, top_k": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
}
PARTS = (
    *("schedule", "build", "sampling", "fetch", "commit", "text", "events", "rest of the loop"),
    *("model graph", "dispatch"),
)
GRAPH = ("model graph", "dispatch")
"""mlx's own."""


class Nested(local):
    """Of one thread: nanoseconds of the timed calls within the one that runs."""

    inner = 0


class Meter:
    """Processor time by part, of the parts' own threads."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, int] = defaultdict(int)
        """Nanoseconds."""
        self._thread = Nested()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        thread, spent, now = self._thread, self.spent, time.thread_time_ns

        def measured(*arguments: Any, **named: Any) -> Any:
            outer, thread.inner = thread.inner, 0
            start = now()
            try:
                return call(*arguments, **named)
            finally:
                took = now() - start
                spent[name] += took - thread.inner
                thread.inner = outer + took

        return measured

    @contextmanager
    def watching(self) -> Iterator[None]:
        places: list[tuple[Any, str, str]] = [
            (Scheduler, "schedule", "schedule"),
            (Scheduler, "commit", "commit"),
            (MlxRunner, "step", "build"),
            (Residents, "gather", "build"),
            (draws.Draws, "launch", "sampling"),
            (draws.Draws, "finish", "sampling"),
            (Flight, "read", "fetch"),
            (AnswerText, "add", "text"),
            (Answers, "take", "events"),
            (Answers, "tell", "events"),
            (mx, "async_eval", "dispatch"),
            (mx, "eval", "fetch"),
        ]
        kept = [(place, name, getattr(place, name)) for place, name, _ in places]
        for place, name, part in places:
            setattr(place, name, self.timed(part, getattr(place, name)))
        try:
            yield
        finally:
            for place, name, call in kept:
                setattr(place, name, call)


class Split:
    """A model's (body, head), as the runner takes it, timed."""

    def __init__(self, meter: Meter, runner: MlxRunner) -> None:
        runner._forward = meter.timed("model graph", runner._forward)
        if runner._split is not None:
            body, head = runner._split
            runner._split = meter.timed("model graph", body), meter.timed("model graph", head)


def factory(layers: int, meter: Meter) -> Callable[[], LoadedModel]:
    source = resolve_model(None)

    def load() -> LoadedModel:
        tokenizer = load_tokenizer(source.folder)
        shape = llama(
            "tiny",
            hidden_size=32,
            num_hidden_layers=layers,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=tokenizer.vocab_size,
        )
        model = build(shape, mx.float32)
        finding, runner = make_runner(model, shape.vocab_size)
        make_cache = cache_factory(model)
        states = measure_states(model, shape.vocab_size, make_cache, finding.batching, image_bytes=0)
        Split(meter, runner)
        info = ModelInfo(
            name="tiny",
            context_length=4096,
            created=0,
            architecture="llama",
            batching=str(finding.batching),
            device="cpu",
            dtype="float32",
            kv_bytes_per_token=0,
            vision=False,
        )
        return LoadedModel(info, tokenizer, runner, states=states, device=MlxDevice())

    return load


async def measure(meter: Meter, layers: int, rows: int, steps: int) -> dict[str, dict[str, float]]:
    """Microseconds of a step, by set and part."""
    engine = Engine(factory(layers, meter), EngineConfig(rows, 4096, rows, prefix_cache_bytes=0))
    await engine.start()
    try:
        return {name: await decode(engine, meter, SETS[name], rows, steps) for name in SETS}
    finally:
        await engine.stop()


async def decode(
    engine: Engine, meter: Meter, settings: dict[str, Any], rows: int, steps: int
) -> dict[str, float]:
    """All rows decode from `begun` on; the first steps, in which they join, are not counted."""
    joined = 8
    begun: asyncio.Event = asyncio.Event()
    first, ended = [0] * 2, [0] * 2

    async def answer(index: int) -> None:
        sampling = SamplingParams(max_tokens=joined + steps + 4, ignore_eos=True, seed=index, **settings)
        prompt = tuple((7 * index + 31 * place) % 1000 + 100 for place in range(PROMPT))
        seen = 0
        async with engine.submit(Request(f"r{index}", prompt, sampling)) as handle:
            async for event in handle:
                if isinstance(event, Finished):
                    return
                seen += 1
                if index == rows - 1 and seen == joined:
                    begin()
                if index == rows - 1 and seen == joined + steps:
                    end()

    def begin() -> None:
        meter.spent.clear()
        first[:] = engine.stats().steps, time.thread_time_ns()
        begun.set()

    kept: dict[str, float] = {}

    def end() -> None:
        ended[:] = engine.stats().steps, time.thread_time_ns()
        done = ended[0] - first[0]
        loop = ended[1] - first[1]
        on_loop = sum(meter.spent[name] for name in ("schedule", "commit", "text", "events"))
        spent = {**meter.spent, "rest of the loop": loop - on_loop}
        kept.update({name: spent.get(name, 0) / done / 1000 for name in PARTS})

    await asyncio.gather(*map(answer, range(rows)))
    return kept


def report(found: dict[str, dict[str, float]]) -> str:
    names = list(found)
    lines = [[part, *(f"{found[name][part]:,.0f}" for name in names)] for part in PARTS]
    ours = [f"{sum(v for part, v in found[name].items() if part not in GRAPH):,.0f}" for name in names]
    return table(["µs a step", *names], [*lines, ["all but the last two", *ours]])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    writing_arguments(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    meter = Meter()
    with meter.watching():
        found = asyncio.run(measure(meter, arguments.layers, arguments.rows, arguments.steps))
    text = "\n\n".join(
        [
            "## What a step costs the host",
            f"`python bench/host.py --layers {arguments.layers} --rows {arguments.rows} --steps "
            f"{arguments.steps}`; {measured_on(arguments.revision)}",
            f"{arguments.rows} rows decode with a llama of {arguments.layers} tiny layers; processor time "
            "of the engine's two threads, memory bounded, prefix cache off, no HTTP. The last two rows are "
            "mlx building the model's graph and handing it to the device.",
            report(found),
        ]
    )
    publish(arguments, "host", text)


if __name__ == "__main__":
    main()
