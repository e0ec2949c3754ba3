"""A disk that is full: answers go on, and what could not be kept is not there."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.prefix import disk as disk_module
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.server.settings import ResponsesSettings, ServerSettings
from tests.engine.driving import events, request, settled, solo
from tests.fakes import FakeRunner, answering, fake_model
from tests.server.harness import CHAT, MODEL, chat_body, lift

SIZE = 256 * 1024
RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Disk:
    """A disk of 256 KiB; or where none may be mounted a folder whose files cannot grow."""

    folder: Path
    mounted: bool

    def fill(self) -> None:
        if not self.mounted:
            _bound_files(1024)
            return
        with (self.folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1024))

    def clear(self) -> None:
        if self.mounted:
            (self.folder / "filler").unlink()
        else:
            _bound_files(SIZE)


def _bound_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "chairlift-test", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        _bound_files(SIZE)
    try:
        yield Disk(folder, mounted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_responses(disk: Disk) -> None:
    """They are kept until it is full; from then on answers say that they are not. What was kept is there."""
    kept = ResponsesSettings(path=disk.folder / "responses.db")
    async with lift(
        FakeRunner(answering("Good morning.")), settings=ServerSettings(responses=kept), context_length=10**5
    ) as server:
        ids = []
        for number in range(60):
            body = {"model": MODEL, "input": f"{number} " + "snow " * 4000}
            response = await server.client.post(RESPONSES, json=body)
            assert response.status_code == 200 and response.json()["status"] == "completed", response.text
            id, stored = response.json()["id"], response.json()["store"]
            if not stored:
                break
            ids.append(id)
        assert ids and not stored, "it was full at some time"
        assert (await server.client.get(f"{RESPONSES}/{id}")).status_code == 404
        for id in ids:
            assert (await server.client.get(f"{RESPONSES}/{id}")).status_code == 200
        assert (await server.client.post(CHAT, json=chat_body())).status_code == 200
        await server.until_idle()


async def test_prefixes(
    disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers stay those of a cold run; once there is room, pages are written again."""
    pages = disk.folder / "pages"
    config = EngineConfig(prefix_cache_bytes=10**6, prefix_cache_disk_bytes=10**8, prefix_cache_folder=pages)
    engine = Engine(fake_model(FakeRunner(), prefix=PrefixSpec(512, 4)), config)
    await engine.start()
    await settled(engine)
    disk.fill()
    try:
        for number in range(10):
            await answered_as_cold(engine, [(number + at) % 251 for at in range(2000)])
        found = engine.stats().disk
        assert (found.failures, found.writes) == (1, 0), "it is not tried again each time"
        assert len([record for record in caplog.records if "not written" in record.getMessage()]) == 1
        disk.clear()
        monkeypatch.setattr(disk_module, "RETRY_SECONDS", 0.0)
        await answered_as_cold(engine, [7] * 2000)
        assert engine.stats().disk.writes > 0
    finally:
        await engine.stop()
    assert {path.suffix for path in pages.rglob("*") if path.is_file()} == {".safetensors"}


async def answered_as_cold(engine: Engine, prompt: list[int]) -> None:
    """And all that it left is written, or will not be."""
    asked = request(prompt)
    found = await events(engine.submit(asked))
    drawn = [token for event in found for token in getattr(event, "token_ids", ())]
    assert drawn == solo(asked, 8)
    await settled(engine)
    assert engine._disk is not None
    assert await asyncio.to_thread(engine._disk.disk.settle, 10)
