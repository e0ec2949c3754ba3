"""Step time of 16 rows under a JSON Schema against 16 plain rows.

`python bench/constraints.py` measures the embedded model and writes the `constraints` section of RESULTS.md;
`--shape qwen3-0.6b` a model of that shape with random weights and a vocabulary made up to its size, for a
GPU. The sets of rows take turns, round by round, so that what else the machine does weighs on all. On a CPU
a step is measured in processor time, which does not count what others do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import mlx.core as mx
from decode import decode_times, device, prompts
from device_models import SHAPES, build
from llguidance import LLTokenizer, TokenizerWrapper, get_version
from machine import package_version, revision
from results import RESULTS, table, write_section

from chairlift.engine.constraints import Compiler, Constraint, Json
from chairlift.engine.constraints.matcher import MaskFiller, Matcher
from chairlift.engine.models.loader import load_model, make_runner
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.plan import NewRow, Runner
from chairlift.engine.request import SamplingParams

ROWS = 16
SCHEMA = """{"type": "array", "minItems": 1000, "items": {"type": "object", "properties": {
  "name": {"type": "string"}, "age": {"type": "integer"},
  "tags": {"type": "array", "items": {"enum": ["a", "b"]}}
}, "required": ["name", "age", "tags"], "additionalProperties": false}}"""
"""No answer comes to its end."""
SETS = {"plain": 0, "one under the schema": 1, "8 under the schema": 8, "all under the schema": ROWS}


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


def loaded(arguments: argparse.Namespace) -> tuple[Runner, int, str, Compiler]:
    """(runner, vocabulary, name, compiler)."""
    if arguments.shape is None:
        source = resolve_model(arguments.model)
        model = load_model(source.folder, source.served_name)
        assert model.constraints is not None
        return model.runner, model.tokenizer.vocab_size, source.served_name, model.constraints
    shape = SHAPES[arguments.shape]
    vocabulary = TokenizerWrapper(MadeUp(shape.vocab_size))
    compiler = Compiler(lambda: LLTokenizer(vocabulary, eos_token=[shape.vocab_size - 1]))
    _, runner = make_runner(build(shape, mx.bfloat16), shape.vocab_size)
    return runner, shape.vocab_size, f"{shape.name}, random bf16 weights", compiler


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


def section(
    name: str, times: dict[str, list[float]], masks: list[float], arguments: argparse.Namespace
) -> str:
    plain = statistics.median(times["plain"])
    on_cpu = mx.default_device() == mx.cpu
    which = f" --shape {arguments.shape}" if arguments.shape else ""
    rows = [(f"{ROWS} rows, {which}", statistics.median(each)) for which, each in times.items()]
    parts = [
        f"## Rows under a schema: {name}",
        f"`python bench/constraints.py{which} --rounds {arguments.rounds} --steps {arguments.steps}`; "
        f"{device()}, mlx {package_version('mlx')}, {get_version().split()[0]}; "
        f"chairlift {arguments.revision or revision() or 'revision unknown'}.",
        "The runner's decode step, temperature 0.8, median of all rounds"
        + ("; processor time." if on_cpu else "."),
        table(
            ["", "step ms", "of plain"],
            [[row, f"{value:.2f}", f"{value / plain:.2f}"] for row, value in rows],
        ),
        f"Filling {ROWS} masks: {statistics.median(masks):.2f} ms, at most {max(masks):.2f} ms.",
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder, a GGUF file or a hub name; the embedded model if left out")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--revision", help="where git does not know it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    runner, vocab, name, compiler = loaded(arguments)
    constraint = compiler.compile(Json(SCHEMA, compact=True), "schema")
    ids, numbers, known = count(1), count(1), prompts(ROWS, 8, vocab)
    times: dict[str, list[float]] = {which: [] for which in SETS}
    for _ in range(arguments.rounds):
        for which, constrained in SETS.items():
            rows = [
                NewRow(
                    next(ids),
                    SamplingParams(temperature=0.8),
                    row,
                    known=known[row],
                    constraint=constraint if row < constrained else None,
                )
                for row in range(ROWS)
            ]
            times[which] += decode_times(runner, rows, arguments.steps, numbers)
    text = section(name, times, fills(constraint, 100), arguments)
    runner.close()
    write_section(
        arguments.results, f"constraints-{arguments.shape}" if arguments.shape else "constraints", text
    )
    print(text)


if __name__ == "__main__":
    main()
