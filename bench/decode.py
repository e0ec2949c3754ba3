"""The runner's decode step of 16 rows, timed: what bench/settings.py and bench/constraints.py share.

The sets of rows take turns, round by round, so that what else the machine does weighs on all. On a CPU a step
is measured in processor time, which does not count what others do.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import mlx.core as mx
from device_models import SHAPES, build
from llguidance import LLTokenizer, TokenizerWrapper
from machine import measured_on
from results import publish, writing_arguments

from chairlift.engine.constraints import Compiler, Constraint
from chairlift.engine.models.loader import load_model, make_runner
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.plan import NewRow, Runner, Span, StepPlan
from chairlift.engine.request import SamplingParams

ROWS = 16
WARM_STEPS = 3
"""Steps that are not timed."""
Row = tuple[SamplingParams, Constraint | None]


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    runner: Runner
    vocab: int
    name: str
    compiler: Compiler


class MadeUp:
    """A vocabulary of bytes and random words, as llguidance asks for one."""

    bos_token_id = None
    special_token_ids: Sequence[int]

    def __init__(self, size: int) -> None:
        draw = random.Random(0)
        words = {bytes([byte]): None for byte in range(256)}
        marks = ['{"', '":', '": ', '",', ', "', '"}', '"]', "[]", " {", "}, ", "\n  "]
        words.update((mark.encode(), None) for mark in marks)
        while len(words) < size - 1:
            letters = string.ascii_lowercase if draw.random() < 0.8 else string.printable
            word = "".join(draw.choice(letters) for _ in range(draw.randint(2, 9)))
            words[(" " * draw.randint(0, 1) + word).encode()] = None
        self.tokens = [*words, b"<|end|>"]
        self.eos_token_id = size - 1
        self.special_token_ids = [self.eos_token_id]
        self._ids = {token: id for id, token in enumerate(self.tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        rest, found = text.encode() if isinstance(text, str) else text, []
        while rest:
            length = next(n for n in range(min(len(rest), 10), 0, -1) if rest[:n] in self._ids)
            found.append(self._ids[rest[:length]])
            rest = rest[length:]
        return found


@contextmanager
def subject(arguments: argparse.Namespace) -> Iterator[Subject]:
    """The model asked for; of `--shape` with random weights and a vocabulary made up to its size."""
    if arguments.shape is None:
        source = resolve_model(arguments.model)
        model = load_model(source.folder, source.served_name)
        assert model.constraints is not None
        made = Subject(model.runner, model.tokenizer.vocab_size, source.served_name, model.constraints)
    else:
        shape = SHAPES[arguments.shape]
        vocabulary = TokenizerWrapper(MadeUp(shape.vocab_size))
        compiler = Compiler(lambda: LLTokenizer(vocabulary, eos_token=[shape.vocab_size - 1]))
        _, runner = make_runner(build(shape, mx.bfloat16), shape.vocab_size)
        made = Subject(runner, shape.vocab_size, f"{shape.name}, random bf16 weights", compiler)
    try:
        yield made
    finally:
        made.runner.close()


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", help="a folder, a GGUF file or a hub name; the embedded model if left out")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=8, help="tokens")
    writing_arguments(parser)
    return parser.parse_args(argv)


def measure(
    subject: Subject, sets: Mapping[str, Sequence[Row]], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds of each step, by set."""
    ids, numbers = count(1), count(1)
    known = [
        tuple((7 * row + 31 * place) % subject.vocab for place in range(arguments.prompt))
        for row in range(ROWS)
    ]
    times: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(arguments.rounds):
        for name, each in times.items():
            rows = [
                NewRow(next(ids), params, seed=row, known=known[row], constraint=constraint)
                for row, (params, constraint) in enumerate(sets[name])
            ]
            each += decode_times(subject.runner, rows, arguments.steps, numbers)
    return times


def decode_times(runner: Runner, rows: Sequence[NewRow], steps: int, numbers: Iterator[int]) -> list[float]:
    """Milliseconds of each step that decodes these rows, behind their prompts.

    Args:
        rows: are admitted, and released at the end; none had its id before.
        numbers: of the plans.
    """
    clock = time.process_time if mx.default_device() == mx.cpu else time.perf_counter

    def step(**parts: object) -> None:
        result = runner.step(StepPlan(next(numbers), **parts))  # type: ignore[arg-type]
        assert result is None or not (result.failed or result.lost)

    ids = tuple(new.row for new in rows)
    step(admit=tuple(rows), prefill=tuple(Span(new.row, 0, new.known, True) for new in rows))
    times: list[float] = []
    for _ in range(WARM_STEPS + steps):
        start = clock()
        step(decode=ids)
        times.append((clock() - start) * 1000)
    step(release=ids)
    return times[WARM_STEPS:]


def write(script: str, title: str, parts: Sequence[str], arguments: argparse.Namespace) -> None:
    """The section of a script and, where one is given, of a shape."""
    which = f" --shape {arguments.shape}" if arguments.shape else ""
    command = (
        f"python bench/{script}.py{which} --rounds {arguments.rounds} --steps {arguments.steps} "
        f"--prompt {arguments.prompt}"
    )
    conditions = f"The runner's decode step, prompts of {arguments.prompt} tokens, median of all rounds"
    conditions += "; processor time." if mx.default_device() == mx.cpu else "."
    heading = f"## {title}", f"`{command}`; {measured_on(arguments.revision, 'llguidance')}", conditions
    name = f"{script}-{arguments.shape}" if arguments.shape else script
    publish(arguments, name, "\n\n".join([*heading, *parts]))
