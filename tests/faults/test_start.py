"""What keeps a server from starting is one clear line and exit code 1."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models import folders
from chairlift.engine.models.gguf import convert_gguf
from chairlift.engine.models.resolve import resolve_model
from chairlift.server.cli.app import run
from tests.engine.models.gguf_files import Llama

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Break = Callable[[Path], object]
PATIENCE = 120


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return convert_gguf(Llama().write(folder / "m.gguf"), folder / "sound", "float32")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def complaint(capsys: Captured, monkeypatch: Patch, *words: str) -> str:
    """The only line that `serve` prints, on standard error; it ends with exit code 1."""
    monkeypatch.setattr("chairlift.server.cli.serve.set_up_logging", lambda *args, **settings: None)
    # It warns of families that it does not know, to where standard error was when it was imported.
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("transformers.configuration_utils"), "disabled", True)
    assert run(["serve", "--config", "/dev/null", "--port", "0", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("chairlift: "), err
    return err


def edit(folder: Path, file: str = "config.json", **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    path = folder / file
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def cut(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def index(folder: Path, *files: str) -> None:
    weights = {f"tensor {number}": file for number, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda model: cut(model, 100_000), "cannot be loaded: .*Perhaps an incomplete download or corrupt"),
        (lambda model: cut(model, 100), r"model\.safetensors is no safetensors file"),
        (lambda model: cut(model, 0), r"model\.safetensors is no safetensors file"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 1000), "is no safetensors file"),
        (lambda model: (model / "model.safetensors").unlink(), "it has no safetensors file"),
        (
            lambda model: index(model, "model.safetensors", "m-2.safetensors", "m-3.safetensors"),
            r"is not whole: m-2\.safetensors and 1 more is missing",
        ),
        (lambda model: edit(model, hidden_size=128), "Expected shape .* but received shape"),
        (lambda model: edit(model, num_hidden_layers=3), r"Missing 9 parameters: .*model\.layers\.2\."),
        (lambda model: edit(model, hidden_size=None), "'hidden_size'"),
        (lambda model: edit(model, model_type=None), "its configuration lacks 'model_type'"),
        (lambda model: edit(model, model_type="no_such_family"), "no_such_family not supported"),
        (without_tokenizer, r"model has no tokenizer \(tokenizer\*, "),
        (lambda model: (model / "tokenizer.json").write_text("{"), "The tokenizer of .* cannot be loaded: "),
        (lambda model: (model / "config.json").unlink(), r"it has no config\.json"),
        (lambda model: config(model, b"{"), r"config\.json holds no JSON object: it is damaged"),
        (lambda model: config(model, b"[]"), "holds no JSON object"),
        (lambda model: config(model, b"\xff\xfe\x00"), "holds no JSON object"),
    ],
)
def test_a_model_that_is_damaged(
    broken: Break, message: str, model: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    broken(model)
    said = complaint(capsys, monkeypatch, "--model", str(model))
    assert re.search(message, said), said


def test_a_prefix_cache_that_cannot_be_kept(model: Path, capsys: Captured, monkeypatch: Patch) -> None:
    def find(*args: object, **settings: object) -> None:
        raise AssertionError("the model was looked for")

    monkeypatch.setattr("chairlift.engine.models.resolve.resolve_model", find)
    folder = model / "config.json" / "kept"
    words = ("--model", str(model), "--prefix-cache-disk", "1GB", "--prefix-cache-dir", str(folder))
    said = complaint(capsys, monkeypatch, *words)
    assert said == f"chairlift: The prefix cache cannot be kept in {folder}: {folder.parent} is no folder.\n"


def test_a_file_that_may_not_be_read(model: Path, capsys: Captured, monkeypatch: Patch) -> None:
    read_text = Path.read_text

    def refuse(path: Path, *args: object, **settings: object) -> str:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "config.json cannot be read: Permission denied." in complaint(
        capsys, monkeypatch, "--model", str(model)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives root's rights away for a moment")
@pytest.mark.parametrize("closed", ["the folder", "its parent", "the configuration"])
def test_what_may_not_be_entered_or_read(closed: str, model: Path) -> None:
    """Without a stand-in."""
    for parent in model.parents:
        if not parent.stat().st_mode & 0o001 and parent.owner() == "root" and parent != model.parent:
            parent.chmod(0o755)
    model.parent.chmod(0o700 if closed == "its parent" else 0o755)
    model.chmod(0o700 if closed == "the folder" else 0o755)
    (model / "config.json").chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(ModelUnavailable) as refused:
            resolve_model(str(model))
    finally:
        os.seteuid(0)
    assert str(model) in refused.value.message and "Permission denied" in refused.value.message


def test_a_disk_that_fills_up_while_a_model_is_converted(tmp_path: Path) -> None:
    """The kernel refuses to write more, as it does on a full disk. Nothing is left behind."""
    file = Llama().write(tmp_path / "m.gguf")
    cache = tmp_path / "cache"
    code = (
        "import resource, sys; from chairlift.server.cli.app import run;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); sys.exit(run(sys.argv[1:]))"
    )
    serve = ["serve", "--config", "/dev/null", "--port", "0", "--model", str(file)]
    environment = {**os.environ, "CHAIRLIFT_CACHE": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-c", code, *serve],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("chairlift: ")]
    assert "cannot be written: File too large" in line
    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, capsys: Captured, monkeypatch: Patch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "file" / "cache"))
    file = Llama().write(tmp_path / "m.gguf")
    assert "cannot be" in complaint(capsys, monkeypatch, "--model", str(file))
    assert folders.cache_folder() == tmp_path / "file" / "cache"


def test_a_port_that_is_taken(model: Path, capsys: Captured, monkeypatch: Patch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = complaint(capsys, monkeypatch, "--model", str(model), "--port", port)
    assert f"127.0.0.1:{port}" in said and "in use" in said
