"""An engine with prefixes on the disk: restarts, waiting for files, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import InvalidParameter, ModelUnavailable
from chairlift.engine.events import Finished
from chairlift.engine.plan import LoadedModel
from chairlift.engine.prefix import disk as disk_module
from chairlift.engine.prefix import waiting
from chairlift.engine.prefix.folder import all_files
from chairlift.engine.prefix.vocabulary import Page, PageData, PrefixSpec
from tests.engine.driving import end, request, settled, solo
from tests.fakes import FakeRunner, fake_model

SPECS = [PrefixSpec(4, 4), PrefixSpec(4, 4, checkpoint_bytes=600)]
PROMPT = [number % 251 for number in range(200)]


@asynccontextmanager
async def serving(folder: Path, spec: PrefixSpec = SPECS[0]) -> AsyncIterator[tuple[Engine, FakeRunner]]:
    runner = FakeRunner()
    config = EngineConfig(prefix_cache_bytes=10**6, prefix_cache_disk_bytes=10**6, prefix_cache_folder=folder)
    engine = Engine(fake_model(runner, prefix=spec), config)
    await engine.start()
    await settled(engine)
    try:
        yield engine, runner
    finally:
        await engine.stop()
    assert runner.violations == [] and runner.closed and not engine.wedged


async def cached(engine: Engine, prompt: list[int] = PROMPT) -> int:
    asked = request(prompt)
    event = await end(engine.submit(asked))
    assert isinstance(event, Finished)
    return event.usage.cached_tokens


class Barrier:
    """Readers stand at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.standing, self.open = threading.Event(), threading.Event()
        read_page = disk_module.read_page

        def read(path: Path, page: Page) -> PageData:
            self.standing.set()
            assert self.open.wait(10)
            return read_page(path, page)

        monkeypatch.setattr(disk_module, "read_page", read)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.standing.wait, 10)


@pytest.fixture
def barrier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Barrier]:
    made = Barrier(monkeypatch)
    yield made
    made.open.set()


@pytest.mark.parametrize("spec", SPECS, ids=["all", "states"])
async def test_a_restarted_engine_finds_what_the_last_one_left(spec: PrefixSpec, tmp_path: Path) -> None:
    kept = 196
    async with serving(tmp_path, spec) as (engine, _):
        assert await cached(engine) == 0
    async with serving(tmp_path, spec) as (engine, runner):
        assert await cached(engine) == kept
        stats = engine.stats()
        assert stats.prefix.disk_hit_tokens == kept and stats.disk.reads >= kept // 4
        assert stats.disk.failures == 0
        assert sum(len(span.tokens) for plan in runner.plans for span in plan.prefill) < 20
        assert await cached(engine) > 190, "now from memory"
        assert engine.stats().prefix.disk_hit_tokens == kept


async def test_answers_are_those_of_a_cold_run(tmp_path: Path) -> None:
    for _ in range(3):
        async with serving(tmp_path) as (engine, _):
            asked = request(PROMPT)
            handle = engine.submit(asked)
            drawn = [token async for event in handle for token in getattr(event, "token_ids", ())]
            assert drawn == solo(asked, 8)


async def test_the_engine_sleeps_while_all_wait_for_the_disk(tmp_path: Path, barrier: Barrier) -> None:
    async with serving(tmp_path) as (engine, _):
        await cached(engine)
    async with serving(tmp_path) as (engine, runner):
        task = asyncio.create_task(cached(engine))
        await barrier.reached()
        for _ in range(5):
            await asyncio.sleep(0)
            assert engine._thread is not None
            await engine._thread.run(lambda: None)
        plans = len(runner.plans)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(runner.plans) == plans and engine.stats().waiting == 1
        assert await cached(engine, [7] * 30) == 0, "another goes ahead"
        barrier.open.set()
        assert await task == 196


async def test_a_client_may_leave_while_its_row_waits_for_the_disk(tmp_path: Path, barrier: Barrier) -> None:
    async with serving(tmp_path) as (engine, _):
        await cached(engine)
    async with serving(tmp_path) as (engine, _):
        async with engine.submit(request(PROMPT)):
            await barrier.reached()
        assert engine.stats().waiting == 0
        barrier.open.set()
        assert await cached(engine) == 196


async def test_a_disk_that_hangs_costs_a_time_and_nothing_else(
    tmp_path: Path, barrier: Barrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (engine, _):
        await cached(engine)
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)
    async with serving(tmp_path) as (engine, _):
        assert await cached(engine) == 0
        barrier.open.set()


async def test_what_a_step_offers_while_the_files_are_deleted_goes_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, runner):
        runner.close_gate()
        handle = engine.submit(request(PROMPT, max_tokens=30))
        await runner.at_gate()
        await runner.let_through()  # the step that computes the prompt; the next one offers its pages
        clearing = asyncio.create_task(engine.clear_cache(disk=True))
        assert engine._disk is not None
        while not engine._scheduler._tidy:
            await asyncio.sleep(0)
        assert await asyncio.to_thread(engine._disk.disk.settle, 10)
        runner.open_gate()
        await clearing
        handle.cancel()
        await settled(engine)
        assert await asyncio.to_thread(engine._disk.disk.settle, 10)
        assert list(all_files(tmp_path)) == [] and engine.stats().disk.entries == 0


async def test_damaged_files_are_computed_anew(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, _):
        await cached(engine)
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    async with serving(tmp_path) as (engine, _):
        assert await cached(engine) == 0
        assert engine.stats().disk.failures > 0
    async with serving(tmp_path) as (engine, _):
        assert await cached(engine) > 0, "what was damaged has been written again"


async def test_a_folder_that_cannot_be_used_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="The prefix cache cannot be kept in .*/file: .* is no folder"):
        async with serving(tmp_path / "file"):
            pass


async def test_it_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def load() -> LoadedModel:
        raise AssertionError("loaded")

    config = EngineConfig(prefix_cache_disk_bytes=10**6, prefix_cache_folder=tmp_path / "file" / "kept")
    with pytest.raises(ModelUnavailable, match="The prefix cache cannot be kept in"):
        await Engine(load, config).start()


async def test_a_model_whose_prefixes_are_not_kept_is_served_without(tmp_path: Path) -> None:
    """The disk is asked for on behalf of all models of a server."""
    for model in (fake_model(FakeRunner()), fake_model(FakeRunner(), prefix=SPECS[0], weight_bytes=10**9)):
        config = EngineConfig(
            memory_limit_bytes=10**9, prefix_cache_disk_bytes=10**6, prefix_cache_folder=tmp_path
        )
        engine = Engine(model, config)
        await engine.start()
        assert await cached(engine) == await cached(engine) == 0
        await engine.stop()
        assert list(all_files(tmp_path)) == [] and engine.stats().disk.limit_bytes == 0


def test_files_need_memory() -> None:
    with pytest.raises(InvalidParameter):
        EngineConfig(prefix_cache_bytes=0, prefix_cache_disk_bytes=1)
