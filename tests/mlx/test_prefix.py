"""Rows that begin with what earlier ones left answer as if they had computed it: every kind of cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.events import Finished, TextDelta
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.loader import load_model
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.request import Request
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import GREEDY
from tests.mlx.parity import finding, solo
from tests.mlx.prefix_server import TOKENS, Server, words
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
