"""Rows that begin with what earlier ones left answer as if they had computed it: every kind of cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.events import Finished, TextDelta
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.loader import load_model
from chairlift.engine.plan import Sample
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.request import Request
from chairlift.engine.row import Row
from chairlift.engine.runner import MlxRunner
from chairlift.engine.scheduler import Scheduler
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import GREEDY, Ride, differences
from tests.mlx.parity import finding, solo
from tests.mlx.test_quantized_kv import folder
from tests.mlx.test_quantized_kv import runner as quantized

FAMILIES = {
    "llama": False,
    "gemma2": False,
    "deepseek_v3": False,
    "gemma3_text": True,
    "gpt_oss": True,
    "mamba2": True,
    "qwen3_5": True,
    "falcon_h1": True,
    "lfm2": True,
    "rwkv7": True,
}
"""Whether the family resumes at checkpoints only."""
TOKENS = 6


@dataclass
class Server:
    """A scheduler over a runner, stepped as the engine does it."""

    runner: MlxRunner
    scheduler: Scheduler
    answers: dict[Row, list[Sample]] = field(default_factory=dict)
    disk: PrefixDisk | None = None

    @classmethod
    def of(
        cls, runner: MlxRunner, room: int = 10**9, budget: int = 64, disk: PrefixDisk | None = None
    ) -> Server:
        assert runner.prefix is not None
        spec = runner.prefix
        small = PrefixSpec(8, spec.bytes_per_token, spec.checkpoint_bytes, checkpoint_tokens=64)
        scheduler = Scheduler(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_waiting=64,
            context_length=4096,
            clock=lambda: 0.0,
            prefixes=Prefixes(PrefixIndex(small, room), lambda: 0.0, catalogue=disk),
        )
        if disk is not None:
            runner.spill(disk)
        return cls(runner, scheduler, disk=disk)

    def add(self, prompt: Sequence[int], tokens: int = TOKENS) -> Row:
        sampling = type(GREEDY)(max_tokens=tokens, temperature=0.0, logprobs=1)
        row = self.scheduler.add(Request("r", tuple(prompt), sampling), seed=0)
        self.answers[row] = []
        return row

    def step(self) -> None:
        plan = self.scheduler.schedule()
        for fetch in self.scheduler.prefixes.take_fetches():
            assert self.disk is not None
            found = {page.digest: self.disk.read(page) for page in fetch.pages}
            self.scheduler.prefixes.fetched(
                fetch.number, {name: data for name, data in found.items() if data}
            )
        committed = self.scheduler.commit(self.runner.step(plan))
        assert not committed.failed
        for row, sample in committed.drawn:
            self.answers[row].append(sample)
            if row.drawn >= row.limit:
                self.scheduler.finish(row)

    def finish(self) -> None:
        while self.scheduler.busy:
            self.step()

    def forget(self) -> None:
        """Have what is kept on the disk, and memory emptied."""
        assert self.disk is not None and self.disk.settle(20)
        assert self.scheduler.prefixes.index is not None
        self.scheduler.prefixes.index.clear()

    def drawn(self, row: Row) -> list[int]:
        return [sample.token for sample in self.answers[row]]

    def wrong(self, name: str) -> list[object]:
        rows = list(self.answers)
        rides = [Ride(tuple(row.request.prompt_token_ids), tokens=row.limit) for row in rows]
        return list(differences(solo(name), rides, [self.answers[row] for row in rows], error=1e-4, tie=1e-4))


def words(start: int, length: int) -> list[int]:
    return [(start + 7 * place + place // 5) % VOCABULARY for place in range(length)]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_taken_over_answers_as_what_is_computed(name: str) -> None:
    runner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    assert runner.prefix is not None and runner.prefix.checkpointed == FAMILIES[name]
    server = Server.of(runner)
    system = words(3, 150)
    first = [server.add(system + words(50, 21)), server.add(system + words(50, 21) + words(9, 40))]
    server.finish()
    assert first[1].cached >= 128, "the second waited for what the first was computing"
    # The next turn of a conversation, the same prompt once more, and another behind the same beginning.
    turn = server.add([*first[0].request.prompt_token_ids, *server.drawn(first[0]), *words(80, 30)])
    again = server.add(first[0].request.prompt_token_ids)
    other = server.add(system[:140] + words(99, 90))
    unlike = server.add(words(200, 60))
    server.finish()
    assert server.wrong(name) == []
    if FAMILIES[name]:
        assert turn.cached == 171 + TOKENS - 1, "behind the answer: its last token was never fed"
        assert again.cached == 168 and other.cached == 128
    else:
        assert turn.cached == 171 + TOKENS - 1 and again.cached == 170 and other.cached == 140
    assert unlike.cached == 0
    stats = runner.stats()
    assert stats.rows == 0 and stats.kv_bytes == 0
    index = server.scheduler.prefixes.index
    assert index is not None and 0 < stats.prefix_bytes <= index.used * 1.1 + 4096
    index.clear()
    server.add(words(1, 3), tokens=1)
    server.finish()
    assert runner.stats().prefix_bytes <= 8 * index.spec.bytes_per_token + index.spec.checkpoint_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_little_room_costs_hits_and_nothing_else(name: str) -> None:
    runner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    assert runner.prefix is not None
    room = 200 * runner.prefix.bytes_per_token + 2 * runner.prefix.checkpoint_bytes
    server = Server.of(runner, room)
    for start in (1, 40, 1, 40, 77, 1):
        server.add(words(start, 100) + words(5, start))
        for _ in range(3):
            server.step()
    server.finish()
    assert server.wrong(name) == []
    assert server.scheduler.prefixes.index is not None and server.scheduler.prefixes.index.evicted
    assert runner.stats().prefix_bytes <= room * 1.1 + 4096


@pytest.mark.parametrize(("name", "taken"), [("llama", 150 + 7), ("qwen3_5", 144)], ids=["llama", "qwen3_5"])
def test_a_preempted_row_goes_on_from_what_it_left(name: str, taken: int) -> None:
    """Its last token is always fed again; a hybrid goes back to the checkpoint before."""
    runner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    server = Server.of(runner)
    rows = [server.add(words(start, 150), tokens=20) for start in (1, 60)]
    while rows[0].drawn < 8:
        server.step()
    server.scheduler.preempt(rows[0])
    hit = server.scheduler.prefixes.index.hit if server.scheduler.prefixes.index else 0
    server.finish()
    assert server.wrong(name) == []
    assert server.scheduler.prefixes.index is not None
    assert server.scheduler.prefixes.index.hit - hit == taken
    assert rows[0].cached == 0, "what the server did for itself is no client's gain"


def test_prefixes_of_another_salt_are_not_shared() -> None:
    runner = make_runner(solo("llama").model, VOCABULARY, Batching.FLAT)[1]
    server = Server.of(runner)
    prompt = tuple(words(3, 60))
    cached = []
    for salt in ("", "one", "", "one", "two"):
        sampling = type(GREEDY)(max_tokens=2, temperature=0.0)
        row = server.scheduler.add(Request("r", prompt, sampling, cache_salt=salt), seed=0)
        server.answers[row] = []
        server.finish()
        cached.append(row.cached)
    assert cached == [0, 0, 59, 59, 0]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[PrefixDisk]:
    made = PrefixDisk(tmp_path, "0" * 32, 10**9)
    made.open()
    yield made
    assert made.close(10)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_comes_from_the_disk_answers_as_what_is_computed(name: str, disk: PrefixDisk) -> None:
    """Rows that run and wait meanwhile, too."""
    runner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    server = Server.of(runner, disk=disk)
    system = words(3, 150)
    first = server.add(system + words(50, 21))
    server.finish()
    assert disk.settle(20) and disk.stats.skipped == 0
    server.forget()
    running = server.add(words(200, 60), tokens=12)
    server.step()
    turn = server.add([*first.request.prompt_token_ids, *server.drawn(first), *words(80, 30)])
    other = server.add(system[:140] + words(99, 90))
    server.finish()
    server.forget()
    again = server.add(first.request.prompt_token_ids)
    server.finish()
    assert server.wrong(name) == []
    if FAMILIES[name]:
        assert turn.cached == 171 + TOKENS - 1 and again.cached == 168
        assert other.cached in (0, 128), "behind a checkpoint of the first, or of none"
    else:
        assert turn.cached == 176 and again.cached == 168 and other.cached == 140
    assert running.cached == 0
    assert server.scheduler.prefixes.stats.disk_hit_tokens >= turn.cached + again.cached
    assert disk.stats.failures == 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_quantized_keys_and_values_come_from_the_disk_as_they_went(
    name: str, kind: str, disk: PrefixDisk
) -> None:
    server = Server.of(quantized(name, kind), disk=disk)
    prompt = words(3, 171)
    cold = server.add(prompt)
    server.finish()
    server.forget()
    warm = server.add(prompt)
    server.finish()
    assert cold.cached == 0 and warm.cached == 168
    for one, two in zip(server.answers[cold], server.answers[warm], strict=True):
        assert one.token == two.token and one.logprob is not None and two.logprob is not None
        assert abs(one.logprob - two.logprob) < 1e-4


async def test_a_restarted_server_finds_its_prefixes(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "llama")
    config = EngineConfig(
        prefix_cache_bytes=10**8, prefix_cache_disk_bytes=10**8, prefix_cache_folder=tmp_path / "cache"
    )
    sampling = type(GREEDY)(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    found = []
    for kind in ("auto", "auto", "int8"):
        engine = Engine(partial(load_model, path, "up", kv_cache_dtype=kind), config)
        await engine.start()
        async with engine.submit(Request("r", tuple(words(3, 150)), sampling)) as handle:
            events = [event async for event in handle]
        await engine.stop()
        tokens = [token for event in events if isinstance(event, TextDelta) for token in event.token_ids]
        assert isinstance(events[-1], Finished) and len(tokens) == TOKENS
        found.append((events[-1].usage.cached_tokens, tokens))
    assert [cached for cached, _ in found] == [0, 144, 0], "other values have other names"
    assert found[0][1] == found[1][1]
