"""Whether serving would work, told before it is tried."""

from __future__ import annotations

import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.kept import with_prefixes
from chairlift.engine.memory.guard import MemoryGuard
from chairlift.engine.models.projection import Projection
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.quantities import size
from chairlift.server import diagnosis
from chairlift.server.configuration.fields import Configuration
from chairlift.server.configuration.types import parse_size
from chairlift.server.diagnosis import Finding, Level, diagnose
from tests.fakes import fake_model
from tests.server.cli.test_doctor import FOUND
from tests.server.test_memory import FakeDevice

Patch = pytest.MonkeyPatch
GB = 10**9
NEEDS = Projection(
    *(8 * GB, 8 * GB),
    token_bytes=100_000,
    windows=(),
    row_bytes=0,
    context_length=8192,
    vocab_size=100_000,
    activation_bytes=200_000_000,
)
# By hand: of 32 rows' logits and a step, twice where MLX keeps what it frees, and copies.
STEPS = 2 * (250_000_000 + 16 * 32 * 100_000) + 128 * 2**20
PROCESS = 200_000_000
MAC = replace(FOUND, memory_bytes=64 * 2**30, working_set_bytes=48 * GB, usable_bytes=45 * GB)


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A model that is here and needs `NEEDS`."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").touch()
    monkeypatch.setattr("chairlift.engine.models.resolve.present_model", lambda name, dtype=None: folder)
    monkeypatch.setattr("chairlift.engine.models.projection.project", lambda folder, **given: NEEDS)
    monkeypatch.setattr("chairlift.engine.models.projection.process_bytes", lambda folder: PROCESS)
    return folder


def given(**settings: Any) -> Configuration:
    return Configuration(**{"port": 0, **settings})


def findings(settings: Configuration, tmp_path: Path, **found: Any) -> dict[str, Finding]:
    examined = replace(MAC, cache_folder=tmp_path / "cache", **found)
    return {finding.what: finding for finding in diagnose(settings, examined)}


def test_all_is_well(tmp_path: Path) -> None:
    found = findings(given(), tmp_path)
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert found["model"].text == (
        "the embedded model: weights 8 GB, keys and values 100 MB for 1000 tokens, 3.2 GB for 32 such "
        "requests"
    )
    left = 37 * GB - STEPS - PROCESS
    assert found["memory"].text == (
        "36.1 GB of 45 GB are left for requests, beside about 737 MB for steps and 200 MB for the process: "
        f"{left // 100_000:,} tokens of all together."
    )
    assert not (tmp_path / "cache").exists()


def memory(tmp_path: Path, monkeypatch: Patch, settings: Configuration, **needs: int) -> Finding:
    changed = replace(NEEDS, **needs)
    monkeypatch.setattr("chairlift.engine.models.projection.project", lambda folder, **given: changed)
    return findings(settings, tmp_path)["memory"]


def test_a_model_that_does_not_fit(tmp_path: Path, monkeypatch: Patch) -> None:
    found = memory(tmp_path, monkeypatch, given(), weight_bytes=70 * GB, peak_bytes=70 * GB)
    assert found == Finding(Level.FAULT, "memory", "70 GB to load and 45 GB may be used: it does not fit.")


def test_a_model_that_would_fit_under_another_limit(tmp_path: Path, monkeypatch: Patch) -> None:
    found = memory(tmp_path, monkeypatch, given(), weight_bytes=50 * GB, peak_bytes=50 * GB)
    # 50 GB, steps, the process and one row that grows until the whole context is there, 5 % more, in MiB
    row = (8128 + 512) * 100_000
    assert found.level is Level.FAULT
    limit = -(-int(1.05 * (50 * GB + STEPS + PROCESS + row)) // 2**20)
    assert found.text.endswith(f": sudo sysctl iogpu.wired_limit_mb={limit}")


def test_room_for_one_but_not_for_all(tmp_path: Path, monkeypatch: Patch) -> None:
    found = memory(tmp_path, monkeypatch, given(max_num_seqs=400))
    assert found.level is Level.WARNING
    assert "400 of 1000 tokens at once do not fit, some would wait" in found.text
    found = memory(tmp_path, monkeypatch, given(), context_length=10**6)
    assert found.level is Level.WARNING and "one of 1,000,000 tokens" in found.text
    found = memory(tmp_path, monkeypatch, given(max_model_len=1000), context_length=10**6)
    assert found.level is Level.OK


def test_it_fits_just_where_a_server_would_start(tmp_path: Path, monkeypatch: Patch) -> None:
    info = {"weight_bytes": NEEDS.weight_bytes, "activation_bytes": 200_000_000, "vocab_size": 100_000}
    device = FakeDevice(shared=True, held=NEEDS.weight_bytes + PROCESS)
    loaded = fake_model(states=NEEDS.states, device=device)()
    loaded = replace(loaded, info=replace(loaded.info, **info))
    least = NEEDS.weight_bytes + STEPS + PROCESS + NEEDS.states.alone(1, 1)
    for limit, fits in ((least, True), (least - 1, False), (int(8.5 * GB), False)):
        config = EngineConfig(memory_limit_bytes=limit)
        with nullcontext() if fits else pytest.raises(ModelUnavailable, match="does not fit"):
            MemoryGuard.of(loaded, config, None, budget=None, weights=None, wake=lambda: None)
        found = findings(given(memory_limit=str(limit)), tmp_path)["memory"]
        assert (found.level is not Level.FAULT) == fits, found
    assert "8 GB of weights, about 737 MB for steps and 200 MB for the process leave nothing" in found.text


@pytest.mark.parametrize(("ram", "disk"), [("auto", "1GB"), ("1GB", "1GB"), ("1GB", "off")])
def test_pages_on_their_way_to_the_disk_are_set_apart_as_a_server_does(
    tmp_path: Path, monkeypatch: Patch, ram: str, disk: str
) -> None:
    """A device of its own has them twice."""
    monkeypatch.setattr("chairlift.engine.models.projection.process_bytes", lambda folder: 0)
    info = {"weight_bytes": NEEDS.weight_bytes, "activation_bytes": 200_000_000, "vocab_size": 100_000}
    spec = PrefixSpec(16, NEEDS.token_bytes)
    loaded = fake_model(states=NEEDS.states, device=FakeDevice(), prefix=spec)()
    loaded = replace(loaded, info=replace(loaded.info, **info))
    bounds = {"prefix_cache_bytes": parse_size(ram), "prefix_cache_disk_bytes": parse_size(disk)}
    config = EngineConfig(memory_limit_bytes=10 * GB, **bounds)
    config = with_prefixes(loaded, config)
    one = MemoryGuard.of(loaded, config, None, budget=None, weights=None, wake=lambda: None)
    assert one.budget is not None
    settings = given(memory_limit="10GB", prefix_cache_ram=ram, prefix_cache_disk=disk)
    found = findings(settings, tmp_path, backend="CUDA")
    text = found["memory"].text
    assert text.startswith(f"{size(one.budget.for_requests)} of 10 GB are left for requests")
    assert ("for pages on their way to the disk" in text) == (disk != "off")
    assert "on their way" not in findings(settings, tmp_path)["memory"].text


def test_a_row_of_the_whole_context_that_does_not_fit_says_which_would(tmp_path: Path) -> None:
    limit = NEEDS.weight_bytes + STEPS + PROCESS + NEEDS.states.alone(1, 2048)
    text = findings(given(memory_limit=str(limit)), tmp_path)["memory"].text
    most = NEEDS.states.longest(NEEDS.states.alone(1, 2048), 8192)
    assert f"one of 8,192 tokens, the model's context, does not fit, one of {most:,} does" in text


def test_a_limit_of_ones_own(tmp_path: Path, monkeypatch: Patch) -> None:
    found = memory(tmp_path, monkeypatch, given(memory_limit="10GB"))
    assert found.level is Level.WARNING and found.text.startswith("1.06 GB of 10 GB are left")
    assert "memory" not in findings(given(memory_limit="off"), tmp_path)


def test_states_and_peaks_are_told(tmp_path: Path, monkeypatch: Patch) -> None:
    memory(tmp_path, monkeypatch, given(), peak_bytes=12 * GB, row_bytes=10**6)
    text = findings(given(), tmp_path)["model"].text
    assert "(12 GB while they load)" in text and "states 1 MB a request" in text


def test_a_model_that_is_not_here_or_cannot_be(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("chairlift.engine.models.resolve.present_model", lambda name, dtype=None: None)
    found = findings(given(model="org/name"), tmp_path)["model"]
    assert found.level is Level.WARNING and "org/name is not here yet" in found.text

    def missing(name: str, dtype: str | None = None) -> None:
        raise ModelUnavailable("There is no such model.")

    monkeypatch.setattr("chairlift.engine.models.resolve.present_model", missing)
    found = findings(given(model="x"), tmp_path)["model"]
    assert found == Finding(Level.FAULT, "model", "There is no such model.")


def test_a_model_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    settings = given()
    levels = [finding.level for finding in diagnose(settings, MAC) if finding.what == "model"]
    assert levels == [Level.FAULT]


def test_a_port_that_is_taken(tmp_path: Path, monkeypatch: Patch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(diagnosis, "occupant", lambda port: "nginx, pid 1")
        for chairlift, level in ((False, Level.FAULT), (True, Level.WARNING)):
            monkeypatch.setattr(diagnosis, "answers_as_chairlift", lambda port, is_ours=chairlift: is_ours)
            found = findings(given(port=port), tmp_path)["port"]
            assert found == Finding(level, "port", f"127.0.0.1:{port} is taken by nginx, pid 1.")


def test_a_host_that_is_not_ours(tmp_path: Path) -> None:
    assert findings(given(host="192.0.2.1"), tmp_path)["port"].level is Level.FAULT


def test_disks(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: SimpleNamespace(free=50 * GB))
    found = findings(given(prefix_cache_disk="100GB", prefix_cache_dir=tmp_path / "kept"), tmp_path)
    text = f"{tmp_path / 'kept'}: 50 GB free, less than the 100 GB that it may take."
    assert found["prefix cache"] == Finding(Level.WARNING, "prefix cache", text)
    assert found["cache"].level is Level.OK
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert findings(given(), tmp_path)["cache"].level is Level.WARNING


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    where = tmp_path / "file"
    found = findings(given(responses_store=str(where / "r.sqlite"), log_file=where / "log"), tmp_path)
    assert found["responses"].level is found["log"].level is Level.FAULT
    found = findings(given(responses_store=str(tmp_path / "new" / "r.sqlite")), tmp_path)
    text = f"{tmp_path / 'new'} cannot be written to: there is no such folder."
    assert found["responses"] == Finding(Level.FAULT, "responses", text)


@pytest.mark.skipif(sys.platform != "linux", reason="a file system that takes no folders is needed")
def test_a_folder_where_nothing_can_be_made(tmp_path: Path) -> None:
    found = findings(given(log_file=Path("/proc/chairlift/log")), tmp_path)["log"]
    assert found.level is Level.FAULT and found.text.startswith("/proc/chairlift cannot be written to: ")


@pytest.mark.parametrize(
    ("asked", "here", "level"),
    [
        (None, True, Level.OK),
        (None, False, Level.FAULT),
        ("model.gguf", True, Level.OK),
        ("model.gguf", False, Level.FAULT),
        ("org/name", False, Level.OK),
    ],
)
def test_a_cache_is_written_to_only_where_a_model_is_to_be_made(
    asked: str | None, here: bool, level: Level, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "cache").touch()  # no folder can be made there
    if not here:
        monkeypatch.setattr("chairlift.engine.models.resolve.present_model", lambda name, dtype=None: None)
    if asked == "model.gguf":
        asked = str(tmp_path / asked)
    settings = given() if asked is None else given(model=asked)
    assert findings(settings, tmp_path)["cache"].level is level


def test_files_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert diagnosis._secret_file(path).level is Level.FAULT
    path.touch()
    path.chmod(0o640)
    assert diagnosis._secret_file(path) == Finding(
        Level.FAULT, "keys", f"Others can read {path}: chmod 600 {path}"
    )
    path.chmod(0o600)
    assert diagnosis._secret_file(path).level is Level.OK


@pytest.mark.parametrize(("hard", "level"), [(256, Level.WARNING), (1024, Level.OK), (-1, Level.OK)])
def test_how_many_files_may_be_open(hard: int, level: Level, tmp_path: Path, monkeypatch: Patch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, hard))
    assert findings(given(), tmp_path)["files"].level is level


@pytest.mark.parametrize("installed", [False, True])
def test_a_slow_blas_comes_with_its_cure(installed: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("chairlift.server.service.define.has_openblas", lambda: installed)
    found = findings(given(), tmp_path, openblas=False)["BLAS"]
    assert found.level is Level.WARNING
    assert "start the command with LD_PRELOAD=libopenblas.so.0 before it" in found.text
    assert ("install OpenBLAS (Debian: libopenblas0-pthread) and " in found.text) is not installed
    assert "BLAS" not in findings(given(), tmp_path, openblas=True)
