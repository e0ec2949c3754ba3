"""Names to folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

pytest.importorskip("mlx.core")

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models import resolve
from chairlift.engine.models.gguf import convert_gguf
from chairlift.engine.models.resolve import ModelSource, present_model, resolve_model
from tests.engine.models.gguf_files import Llama


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(folder))
    return folder


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert_gguf(Llama().write(tmp_path / "m.gguf"), tmp_path / "lift")
    assert resolve_model(str(folder)) == ModelSource(folder, "lift")
    assert resolve_model(str(folder), served_name="up") == ModelSource(folder, "up")
    monkeypatch.chdir(folder)
    assert resolve_model(".").served_name == "lift"


@pytest.mark.parametrize(
    ("files", "message"),
    [([], "it has no config.json"), (["config.json"], "it has no safetensors file")],
)
def test_folders_that_hold_no_model(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelUnavailable, match=message):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_converted_once_wherever_it_lies(tmp_path: Path, cache: Path) -> None:
    path = Llama().write(tmp_path / "one.gguf")
    first = resolve_model(str(path), dtype="float32", progress=False)
    assert first.served_name == "one"
    assert first.folder.is_relative_to(cache)
    made = (first.folder / "model.safetensors").stat().st_ino
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / "one.gguf")
    again = resolve_model(str(moved), dtype="float32", progress=False)
    assert again == first
    assert (again.folder / "model.safetensors").stat().st_ino == made
    assert resolve_model(str(moved), dtype="float16", progress=False).folder != first.folder


def test_other_content_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    first = resolve_model(str(Llama().write(path)), dtype="float32", progress=False)
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[-40] ^= 1  # one bit of a weight; size and time of change as before
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert resolve_model(str(path), dtype="float32", progress=False).folder != first.folder


def test_a_gguf_file_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = Llama().write(tmp_path / "q.gguf", Kind.Q4_0)
    other = Llama().write(tmp_path / "o.gguf", Kind.Q5_0)
    found = {}
    for on_cpu in (True, False):
        monkeypatch.setattr(resolve, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        for path in (quantized, other):
            found[on_cpu, path.stem] = resolve_model(str(path), progress=False).folder.name.split("-")[2]
    assert found == {
        (True, "q"): "float32",
        (True, "o"): "float32",
        (False, "q"): "keep",
        (False, "o"): "float16",
    }


@pytest.mark.parametrize(
    "name", ["nothing", "./org/name", "a/b/c", "none.gguf", "org/none.gguf", "https://x/y"]
)
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(ModelUnavailable, match="no model folder or GGUF file") as refusal:
        resolve_model(name)
    assert name in refusal.value.message


def raising(error: Exception) -> object:
    def snapshot_download(name: str, **settings: object) -> str:
        raise error

    return snapshot_download


def test_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert_gguf(Llama().write(tmp_path / "m.gguf"), tmp_path / "snapshot")
    asked: list[tuple[str, object]] = []

    def snapshot_download(name: str, **settings: object) -> str:
        asked.append((name, settings["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("org/name") == ModelSource(folder, "org/name")
    assert asked == [("org/name", [*resolve.HUB_PATTERNS, resolve.DENSE_PATTERN])]


def test_hub_patterns_are_those_of_mlx_lm() -> None:
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    assert list(resolve.HUB_PATTERNS) == DEFAULT_ALLOW_PATTERNS


def test_hub_refusals_are_one_line_without_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    request = httpx.Request("GET", "http://hub.invalid/org/name")
    response = httpx.Response(404, request=request)
    for error, message in (
        (LocalEntryNotFoundError("http://hub.invalid"), "the hub cannot be reached"),
        (
            RepositoryNotFoundError("http://hub.invalid", response=response),
            "has no such model, or it is private",
        ),
        (GatedRepoError("http://hub.invalid", response=response), "give access on request only"),
        (httpx.ReadTimeout("http://hub.invalid"), r"the download failed \(ReadTimeout\)"),
        (OSError(28, "No space left on device"), r"the download failed \(No space left on device\)"),
    ):
        monkeypatch.setattr("huggingface_hub.snapshot_download", raising(error))
        with pytest.raises(
            ModelUnavailable, match=f"The model org/name cannot be had: .*{message}"
        ) as refusal:
            resolve_model("org/name")
        assert "\n" not in refusal.value.message and "hub.invalid" not in refusal.value.message


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    path = Llama().write(tmp_path / "m.gguf")
    with pytest.raises(ModelUnavailable, match="'int3' is no dtype"):
        resolve_model(str(path), dtype="int3")


def test_what_is_here_without_fetching_or_converting(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Llama().write(tmp_path / "one.gguf")
    assert present_model(str(path), dtype="float32") is None
    source = resolve_model(str(path), dtype="float32", progress=False)
    assert present_model(str(path), dtype="float32") == source.folder
    assert present_model(str(source.folder)) == source.folder
    assert present_model(None, dtype="float32") is None
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert present_model("org/no-such-model-here") is None
    with pytest.raises(ModelUnavailable, match="There is no model folder"):
        present_model(str(tmp_path / "gone" / "er"))
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        present_model(str(tmp_path))
