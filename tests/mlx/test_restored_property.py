"""Random conversations that share beginnings, over every kind of cache: restored equals computed.

From memory and from the disk, with lengths around the borders of pages, rows that run beside others and
beginnings that end in the midst of another's.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.engine.media import PreparedMedia
from chairlift.engine.models.build import make_runner
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.row import Row
from chairlift.engine.runner import MlxRunner
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import LOGPROB_ERROR
from tests.mlx.parity import finding, solo
from tests.mlx.prefix_server import BLOCK, Server
from tests.mlx.solo import TIE
from tests.mlx.test_quantized_kv import EDGE
from tests.mlx.test_quantized_kv import runner as quantized
from tests.mlx.vision_families import FAMILIES, TEXT_TOKENS, Image, VisionFamily
from tests.mlx.vision_prefix import compared, seeing_runner

EXAMPLES = 2
REQUESTS = 3
TEXT = tuple(range(TEXT_TOKENS))
"""What may be drawn by a model that sees."""
Part = tuple[int, ...] | Image
"""Of a prompt: text, or an image."""


@dataclass(frozen=True, slots=True)
class Kind:
    """
    Attributes:
        runner: over a small model.
        sees: the family's images, where it takes some.
        error: most that a log probability may be off; above float32's where keys and values are rounded, and
            one that lies on the edge of two codes falls to either side.
    """

    runner: Callable[[], MlxRunner]
    sees: VisionFamily | None = None
    error: float = LOGPROB_ERROR


def text_runner(name: str) -> MlxRunner:
    return make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]


KINDS = {
    "dense": Kind(partial(text_runner, "llama")),
    "sliding window": Kind(partial(text_runner, "gemma3_text")),
    "latent attention": Kind(partial(text_runner, "deepseek_v3")),
    "window and sinks": Kind(partial(text_runner, "gpt_oss")),
    "Mamba 2": Kind(partial(text_runner, "mamba2")),
    "gated delta": Kind(partial(text_runner, "qwen3_5")),
    "Mamba beside attention": Kind(partial(text_runner, "falcon_h1")),
    "short convolutions": Kind(partial(text_runner, "lfm2")),
    "RWKV": Kind(partial(text_runner, "rwkv7")),
    "8 bits": Kind(partial(quantized, "llama", "int8"), error=EDGE["int8"]),
    "4 bits and gated delta": Kind(partial(quantized, "qwen3_5", "int4"), error=EDGE["int4"]),
    "images": Kind(lambda: seeing_runner("llava")[0], FAMILIES["llava"]),
    "images, positions in three dimensions, gated delta": Kind(
        lambda: seeing_runner("qwen3_5")[0], FAMILIES["qwen3_5"]
    ),
    "images that see both ways, sliding window": Kind(lambda: seeing_runner("gemma4")[0], FAMILIES["gemma4"]),
}


@cache
def runner_of(kind: str) -> MlxRunner:
    return KINDS[kind].runner()


@dataclass
class Talk:
    """Requests to one server, made at random."""

    server: Server
    draw: random.Random
    sees: VisionFamily | None

    def __post_init__(self) -> None:
        self.asked: list[tuple[list[Part], Row]] = []

    def text(self, least: int, most: int) -> tuple[int, ...]:
        """So many blocks, or a few tokens more or less."""
        tokens = BLOCK * self.draw.randint(least, most) + self.draw.choice((-1, 0, 1, 3))
        return tuple(self.draw.choices(TEXT, k=max(1, tokens)))

    def parts(self, least: int, most: int) -> list[Part]:
        """Text, and an image in it now and then."""
        if self.sees is None or self.draw.random() < 0.5:
            return [self.text(least, most)]
        size = self.draw.randint(1, 2), self.draw.randint(1, 2)
        return [self.text(least, most), self.sees.image(*size, seed=self.draw.randint(0, 2)), self.text(1, 4)]

    def shortened(self, parts: Sequence[Part]) -> list[Part]:
        """A beginning that ends in one of the texts."""
        kept = list(parts[: self.draw.randint(1, len(parts))])
        while not isinstance(last := kept.pop(), tuple):
            pass
        return [*kept, last[: self.draw.randint(1, len(last))]]

    def ask(self, parts: list[Part]) -> Row:
        tokens = [token for part in parts for token in (part if isinstance(part, tuple) else part.tokens)]
        row = self.server.add(tokens, media=media_of(self.sees, parts), allowed=TEXT)
        self.asked.append((parts, row))
        return row

    def go_on(self) -> None:
        """Something that begins as something before it."""
        parts, row = self.draw.choice(self.asked)
        if row.finished and self.draw.random() < 0.5:
            begun: list[Part] = [*parts, tuple(self.server.drawn(row))]
        else:
            begun = self.shortened(parts)
        self.ask([*begun, *self.parts(0, 6)])
        for _ in range(self.draw.randint(0, 10)):
            if self.server.scheduler.busy:
                self.server.step()
        if self.draw.random() < 0.4:
            self.server.finish()
            if self.draw.random() < 0.5:
                self.server.forget()

    def wrong(self, runner: MlxRunner, error: float) -> list[int]:
        """What was asked, by number, that a server which keeps nothing answers otherwise."""
        cold = Server.of(runner, keeps=False)
        rows = [
            cold.add(row.request.prompt_token_ids, media=media_of(self.sees, parts), allowed=TEXT)
            for parts, row in self.asked
        ]
        cold.finish()
        tie = max(TIE, 10 * error)
        return [
            number
            for number, ((_, row), mine) in enumerate(zip(self.asked, rows, strict=True))
            if not compared(cold.answers[mine], self.server.answers[row], error, tie)
        ]


def media_of(family: VisionFamily | None, parts: Sequence[Part]) -> PreparedMedia | None:
    images = [part for part in parts if isinstance(part, Image)]
    return family.media(images) if family is not None and images else None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_restored_equals_computed(kind: str, seed: int) -> None:
    runner, tried = runner_of(kind), KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        disk = PrefixDisk(Path(folder), "0" * 32, 10**9)
        disk.open()
        talk = Talk(Server.of(runner, disk=disk), random.Random(seed), tried.sees)
        first = [talk.text(17, 20), *talk.parts(1, 2), talk.text(2, 3)]
        talk.ask(first)
        for _ in range(REQUESTS):
            talk.go_on()
        talk.server.finish()
        from_memory = talk.ask(first)
        talk.server.finish()
        talk.server.forget()
        before = talk.server.scheduler.prefixes.stats.disk_hit_tokens
        from_disk = talk.ask([*first, talk.text(1, 3)])
        talk.server.finish()
        assert from_memory.cached >= 128 and from_disk.cached >= 128
        assert talk.server.scheduler.prefixes.stats.disk_hit_tokens - before >= 120
        assert talk.wrong(runner, tried.error) == []
        assert disk.close(10) and disk.stats.failures == 0
