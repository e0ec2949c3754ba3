"""From what a user names to a model folder on this machine."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.embedded import NAME, embedded_folder, embedded_model
from chairlift.engine.models.folders import build_folder, cache_folder
from chairlift.engine.models.gguf import CONVERSION, Dtype, can_keep, dtype_named, fill_model_folder
from chairlift.engine.models.gguf_file import GGUFFile
from chairlift.engine.models.soundness import check_folder
from chairlift.engine.models.wheels import sha256_of

HUB_PATTERNS = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
"""The files of a repository that a model needs (mlx-lm's `DEFAULT_ALLOW_PATTERNS`)."""

DENSE_PATTERN = "*_Dense/model.safetensors"
"""Layers that sentence-transformers keeps beside an embedding model."""

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder (config.json, *.safetensors, tokenizer files) and the name it is served under."""

    folder: Path
    served_name: str


def resolve_model(
    name: str | None, *, served_name: str | None = None, dtype: str | None = None, progress: bool = True
) -> ModelSource:
    """Find, fetch or convert the model that `name` means. Blocks, for minutes if it has to download.

    `name` is a model folder, a GGUF file, or an `org/name` of the Hugging Face hub; None is the embedded
    model. `dtype` matters to GGUF files only, which are converted once into the cache folder; None is the
    type that suits the device.

    Raises:
        ModelUnavailable: one clear line.
    """
    called = served_name or default_name(name)
    if name is None:
        return ModelSource(embedded_model(_embedded_dtype(dtype), progress=progress), called)
    path = model_path(name)
    if path.is_dir():
        return ModelSource(_checked(path), called)
    if path.is_file():
        return ModelSource(_converted(path, _gguf_dtype(path, dtype), progress=progress), called)
    if HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return ModelSource(_checked(_from_hub(name, progress=progress)), called)
    raise _no_such_model(name)


def default_name(model: str | None) -> str:
    """That a model is served under where none is given; it need not be here. Fetches nothing."""
    if model is None:
        return NAME
    path = Path(model).expanduser()
    if os.path.isdir(path):  # unlike `Path.is_dir`, also where a folder on the way is closed
        return path.resolve().name
    return path.stem if os.path.isfile(path) else model


def present_model(name: str | None, *, dtype: str | None = None) -> Path | None:
    """The model folder that `resolve_model` would return, if nothing has to be fetched or converted first;
    else None.

    Raises:
        ModelUnavailable: it means nothing, or a folder that is no model.
    """
    if name is None:
        folder = embedded_folder(_embedded_dtype(dtype))
        return folder if folder.is_dir() else None
    path = model_path(name)
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        folder = _conversion(path, _gguf_dtype(path, dtype))
        return folder if folder.is_dir() else None
    if not HUB_NAME.fullmatch(name) or path.suffix == ".gguf":
        raise _no_such_model(name)
    from huggingface_hub import snapshot_download

    try:
        return _checked(Path(snapshot_download(name, allow_patterns=[*HUB_PATTERNS], local_files_only=True)))
    except Exception:  # not there, or not all of it
        return None


def model_path(name: str) -> Path:
    """Raises: ModelUnavailable: a folder on the way may not be entered."""
    path = Path(name).expanduser()
    try:
        path.exists()
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}.") from None
    return path


def _no_such_model(name: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"There is no model folder or GGUF file {name}, and a name on the hub has the form org/name."
    )


def resolve_embedding_model(
    name: str, *, served_name: str | None = None, progress: bool = True
) -> ModelSource:
    """Find or fetch an embedding model: a model folder or an `org/name` of the Hugging Face hub.

    Raises:
        ModelUnavailable: one clear line.
    """
    path = model_path(name)
    if path.is_file() or (not path.is_dir() and not HUB_NAME.fullmatch(name)):
        raise ModelUnavailable(f"{name} is no embedding model: that is a folder, or org/name on the hub.")
    return resolve_model(name, served_name=served_name, progress=progress)


def _checked(folder: Path) -> Path:
    check_folder(folder)
    return folder


def _converted(path: Path, dtype: Dtype, *, progress: bool) -> Path:
    """The cached conversion of a GGUF file, found again by its content wherever the file lies."""
    folder = _conversion(path, dtype)
    return build_folder(folder, lambda partial: fill_model_folder(path, partial, dtype, progress=progress))


def _conversion(path: Path, dtype: Dtype) -> Path:
    return cache_folder() / "models" / f"{path.stem}-{_digest(path)[:16]}-{dtype}-{CONVERSION}"


def _digest(path: Path) -> str:
    """SHA-256 of the file, remembered for as long as its size and times stay as they are."""
    state = path.stat()
    identity = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ctime_ns}\0{state.st_ino}"
    note = cache_folder() / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    try:
        known = note.read_text()
    except OSError:
        known = ""
    if re.fullmatch("[0-9a-f]{64}", known):
        return known
    try:
        digest = sha256_of(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_text(digest)
        partial.replace(note)
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read or noted: {error.strerror}.") from error
    return digest


def _from_hub(name: str, *, progress: bool) -> Path:
    """The snapshot of a hub repository: the cached one where the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub.utils import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        disable_progress_bars,
    )

    if not progress:
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[*HUB_PATTERNS, DENSE_PATTERN]))
    except GatedRepoError:
        why = "its makers give access on request only; log in with an account that has it"
    except (RepositoryNotFoundError, HFValidationError):
        why = "the hub has no such model, or it is private"
    except LocalEntryNotFoundError:
        why = "it is not on this machine and the hub cannot be reached"
    except Exception as error:  # whatever the connection, the disk or the hub's answer does
        what = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        why = f"the download failed ({what})"
    raise ModelUnavailable(f"The model {name} cannot be had: {why}.") from None


def _gguf_dtype(path: Path, dtype: str | None) -> Dtype:
    """float32 on a CPU, which is slow at anything else; elsewhere as the file is, if MLX can hold that."""
    if dtype is not None:
        return dtype_named(dtype)
    if on_cpu():
        return "float32"
    return "keep" if can_keep(GGUFFile(path)) else "float16"


def _embedded_dtype(dtype: str | None) -> Dtype:
    return dtype_named(dtype) if dtype is not None else ("float32" if on_cpu() else "float16")


def on_cpu() -> bool:
    import mlx.core as mx

    return bool(mx.default_device().type == mx.DeviceType.cpu)
