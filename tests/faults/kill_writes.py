"""kill -9 while prefixes are written to the disk: what is there afterwards is right, or not there.

    python -m tests.faults.kill_writes --kills 50

A server of a small random model is killed in the midst of writing, and started again on the same folder;
prompts whose prefixes the killed ones have left must be answered as by a server that keeps nothing. Two
models take turns in one folder, a hybrid and one all of whose layers keep every token. Between two lives
some files are damaged, too: cut short, changed in one bit, or put in another's place.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.small_models import write_model
from tests.served.process import PATIENCE, Served, serving

Prompt = tuple[int, ...]
MODELS = {
    "qwen3_5": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    "llama": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
}
"""Families, and what makes their pages large (512 KiB): writing one takes as long as can be had."""
VOCABULARY = 192
TOKENS = 6
ERROR = 1e-4
"""Most that a log probability may be off, in float32."""
SYSTEMS, SYSTEM, TAIL = 4, 160, (100, 400)
"""Beginnings that prompts share, their tokens, and how many follow."""
AT_ONCE = 3
"""Prompts computed and written when the server is killed."""
CHECKED = 5
"""Prompts asked of each server before."""
DAMAGED = 3
"""Files damaged between two servers."""
MOST_FILES = 40
"""Written by a server before it is killed, if its prompts make so many, or some more."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    cached: int

    def is_like(self, other: Answer) -> bool:
        near = all(abs(a - b) <= ERROR for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and near


@dataclass(slots=True)
class Outcome:
    kills: int = 0
    unfinished: int = 0
    """Kills that left a file which was not finished."""
    files: int = 0
    """Files that the last kill left."""
    compared: int = 0
    wrong: list[Prompt] = field(default_factory=list)
    cached_tokens: int = 0
    """Of prompts that were asked again."""
    disk_tokens: int = 0
    """Of these, tokens that came from the disk."""
    damaged: int = 0
    refused: int = 0
    """Files that servers found not to be as they should, and deleted."""

    def __str__(self) -> str:
        told = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return ", ".join(f"{name} {len(n) if isinstance(n, list) else n}" for name, n in told)


@dataclass(slots=True)
class Killing:
    """
    Args:
        models: folders of models, which take turns.
        folder: for the prefixes of all of them.
        seed: of everything drawn at random.
    """

    models: Sequence[Path]
    folder: Path
    seed: int
    outcome: Outcome = field(default_factory=Outcome)
    _right: dict[Prompt, Answer] = field(default_factory=dict)
    """By prompt: each is one model's."""
    _asked: dict[Path, list[Prompt]] = field(default_factory=dict)

    def run(self, kills: int) -> Outcome:
        draw = random.Random(self.seed)
        turns = [self.models[turn % len(self.models)] for turn in range(kills)]
        rounds = [(model, tuple(_prompts(draw, AT_ONCE))) for model in turns]
        for model in self.models:
            self._asked[model] = []
            with serving("--model", str(model), "--prefix-cache-ram", "off") as server:
                for prompt in (prompt for own, prompts in rounds for prompt in prompts if own == model):
                    self._right[prompt] = ask(server, prompt)
        for model, prompts in rounds:
            with self._serving(model) as server:
                self._check(server, self._asked[model], draw)
                self._kill(server, prompts, draw)
            self._asked[model] += prompts
            self.outcome.kills += 1
            self._look()
            self._damage(draw)
        for model in self.models:
            with self._serving(model) as server:
                self._check(server, self._asked[model], draw)
        return self.outcome

    def _serving(self, model: Path) -> AbstractContextManager[Served]:
        return serving(
            *("--model", str(model), "--prefix-cache-ram", "256MB"),
            *("--prefix-cache-disk", "1GB", "--prefix-cache-dir", str(self.folder)),
        )

    def _check(self, server: Served, asked: Sequence[Prompt], draw: random.Random) -> None:
        """Ask again for what earlier servers were asked, the last one's prompts among them."""
        chosen = [*asked[-AT_ONCE:], *draw.sample(asked, min(len(asked), CHECKED - AT_ONCE))]
        for prompt in chosen:
            answer = ask(server, prompt)
            self.outcome.compared += 1
            self.outcome.cached_tokens += answer.cached
            if not answer.is_like(self._right[prompt]):
                self.outcome.wrong.append(prompt)
        found = counters(server)
        self.outcome.disk_tokens += int(found["prefix_cache_disk_hits_total"])
        self.outcome.refused += int(found["prefix_cache_disk_failures_total"])

    def _kill(self, server: Served, prompts: Sequence[Prompt], draw: random.Random) -> None:
        """SIGKILL some time after some of these prompts' files have come."""
        enough = count(self.folder) + draw.randint(1, MOST_FILES)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = [threads.submit(ask, server, prompt) for prompt in prompts]
            while count(self.folder) < enough and not all(answer.done() for answer in answers):
                pass  # the moment matters: files take less than a millisecond
            time.sleep(draw.choice([0.0, 0.0, draw.uniform(0, 0.01), draw.uniform(0, 2)]))
            server.process.kill()
            server.process.wait(PATIENCE)
            for prompt, answer in zip(prompts, answers, strict=True):
                self._take(prompt, answer)

    def _take(self, prompt: Prompt, future: Future[Answer]) -> None:
        """An answer that was there before the kill has to be right, too."""
        try:
            answer = future.result()
        except httpx.HTTPError:
            return
        self.outcome.compared += 1
        if not answer.is_like(self._right[prompt]):
            self.outcome.wrong.append(prompt)

    def _look(self) -> None:
        self.outcome.files = len(files(self.folder))
        unfinished = list(self.folder.glob("*/*/.*.tmp"))
        self.outcome.unfinished += bool(unfinished)
        for path in unfinished:
            path.unlink()  # servers do so after an hour; here each kill is to be told from the one before

    def _damage(self, draw: random.Random) -> None:
        """Cut a file short, change a byte of another, and put a copy of one in another's place."""
        found = files(self.folder)
        if len(found) <= DAMAGED:
            return
        torn, changed, foreign, other = (draw.choice(found) for _ in range(DAMAGED + 1))
        data = torn.read_bytes()
        torn.write_bytes(data[: draw.randrange(len(data))])
        data = bytearray(changed.read_bytes() or b"x")
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        changed.write_bytes(data)
        if foreign != other:
            shutil.copyfile(other, foreign)
        self.outcome.damaged += DAMAGED


def _prompts(draw: random.Random, count: int) -> Iterator[Prompt]:
    for _ in range(count):
        system = random.Random(draw.randrange(SYSTEMS)).choices(range(VOCABULARY), k=SYSTEM)
        yield (*system, *draw.choices(range(VOCABULARY), k=draw.randint(*TAIL)))


def ask(server: Served, prompt: Prompt) -> Answer:
    body = {
        "model": server.announced.split(" serves ")[1].split(" at ")[0],
        "prompt": list(prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    found = response.json()
    logprobs = found["choices"][0]["logprobs"]
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]), cached)


def counters(server: Served) -> dict[str, float]:
    """Samples by name, without prefix."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples if "le" not in sample.labels)
    return {sample.name.removeprefix("chairlift_"): sample.value for sample in samples}


def count(folder: Path) -> int:
    """Files that are finished, quickly."""
    found = 0
    with suppress(FileNotFoundError):
        for model in os.scandir(folder):
            for part in os.scandir(model.path):
                found += sum(not name.startswith(".") for name in os.listdir(part.path))
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.safetensors"))


def kill(kills: int, seed: int, families: Collection[str] = tuple(MODELS)) -> Outcome:
    """So many kills, in folders that go afterwards."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        models = [
            write_model(root / name, name, **fields) for name, fields in MODELS.items() if name in families
        ]
        return Killing(models, root / "prefixes", seed).run(kills)


def main() -> int:
    options = argparse.ArgumentParser(description="Kill servers that write prefixes to the disk.")
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    outcome = kill(given.kills, given.seed)
    print(outcome)
    return bool(outcome.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
