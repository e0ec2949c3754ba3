"""What `chairlift doctor` says about serving with certain settings: whether it would work, and what would be
missing."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.quantities import size
from chairlift.server.configuration.fields import Configuration
from chairlift.server.configuration.serving import model_options
from chairlift.server.configuration.types import parse_size, store_path
from chairlift.server.models.model import Use
from chairlift.server.occupant import answers_as_chairlift, occupant
from chairlift.server.serve import listen
from chairlift.server.served import ModelOptions

if TYPE_CHECKING:
    from chairlift.engine.doctor import Examination
    from chairlift.engine.models.projection import Projection

PROMPT = 1000
"""Tokens of a request, where an example is needed."""
FEW_FILES = 1024
"""Each connection takes one, and so do the model's files."""
FREE_BYTES = 2**30
"""Below that a disk is as good as full."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    """`chairlift serve` would not start, or not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    text: str


def diagnose(given: Configuration, found: Examination) -> list[Finding]:
    """
    Args:
        given: the settings of the server that is to be.
        found: the machine.
    """
    models = [each for each in model_options(given) if each.use is not Use.EMBEDDING]
    told = [finding for model in models for finding in _model(model, given, found)]
    converts = any(_converts(model) for model in models)
    folders = _folders(given, found, converts=converts)
    return [*told, *_port(given), *folders, *_secrets(given), *_files(found)]


def _model(asked: ModelOptions, given: Configuration, found: Examination) -> Iterator[Finding]:
    """Of one model, by itself."""
    from chairlift.engine.models.projection import process_bytes, project
    from chairlift.engine.models.resolve import present_model
    from chairlift.engine.models.soundness import has_tokenizer

    name = asked.model or "the embedded model"
    try:
        folder = present_model(asked.model, dtype=asked.dtype)
        if folder is None:
            yield Finding(
                Level.WARNING, "model", f"{name} is not here yet: the first start fetches or converts it."
            )
            return
        needs = project(folder, dtype=asked.dtype, kv_cache_dtype=asked.kv_cache_dtype)
        if not has_tokenizer(folder):
            yield Finding(Level.FAULT, "model", f"{name} has no tokenizer.")
            return
        process = process_bytes(folder)
    except ModelUnavailable as error:
        yield Finding(Level.FAULT, "model", error.message)
        return
    yield Finding(Level.OK, "model", f"{name}: {needed(needs, asked.engine.max_num_seqs)}")
    limit = parse_size(given.memory_limit)
    usable = found.usable_bytes if limit is None else limit
    if usable:
        yield memory(needs, process, asked, usable, found)


def _converts(asked: ModelOptions) -> bool:
    """Whether the start makes a model folder in the cache; what the hub has is kept elsewhere."""
    from chairlift.engine.models.resolve import model_path, present_model

    try:
        here = present_model(asked.model, dtype=asked.dtype) is not None
        return not here and (asked.model is None or model_path(asked.model).is_file())
    except ModelUnavailable:
        return False  # there is a finding about that


def needed(needs: Projection, rows: int) -> str:
    """What a model takes, in words."""
    text = f"weights {size(needs.weight_bytes)}"
    if needs.peak_bytes > needs.weight_bytes:
        text += f" ({size(needs.peak_bytes)} while they load)"
    one, all_ = needs.rows(1, PROMPT), needs.rows(rows, PROMPT)
    text += f", keys and values {size(one)} for {PROMPT} tokens"
    text += f", {size(all_)} for {rows} such requests"
    if needs.row_bytes:
        text += f", of which states {size(needs.row_bytes)} a request"
    return text


def memory(needs: Projection, process: int, asked: ModelOptions, usable: int, found: Examination) -> Finding:
    """Whether it fits, by the server's own arithmetic, and the command that would make it fit.

    Args:
        process: bytes that the server's process takes beside its models.
        usable: bytes that the server may take.
    """
    rows = asked.engine.max_num_seqs
    context = min(needs.context_length, asked.max_model_len or needs.context_length)
    steps, states = needs.step_bytes(rows), needs.states
    copies = _copies(needs, asked, usable, found)
    fixed = needs.weight_bytes + steps + process + copies
    one, many = fixed + states.alone(1, context - 1), fixed + needs.rows(rows, PROMPT)
    taken = {"steps": steps, "pages on their way to the disk": copies, "the process": process}
    beside = "about " + " and ".join(f"{size(each)} for {what}" for what, each in taken.items() if each)
    if needs.peak_bytes > usable:
        text = f"{size(needs.peak_bytes)} to load and {size(usable)} may be used: it does not fit"
        return Finding(Level.FAULT, "memory", text + wired(max(one, needs.peak_bytes), found))
    if (least := fixed + states.alone(1, 1)) > usable:
        text = (
            f"{size(needs.weight_bytes)} of weights, {beside} leave nothing of {size(usable)} for a request"
        )
        text += f" ({size(least)} would do): it does not fit"
        return Finding(Level.FAULT, "memory", text + wired(one, found))
    room = usable - fixed
    text = f"{size(room)} of {size(usable)} are left for requests, beside {beside}"
    if needs.token_bytes:
        text += f": {room // needs.token_bytes:,} tokens of all together"
    short = max(one, many) > usable
    if one > usable:
        most = states.longest(room, context)
        text += f"; one of {context:,} tokens, the model's context, does not fit, one of {most:,} does"
    elif short:
        text += f"; {rows} of {PROMPT} tokens at once do not fit, some would wait"
    return Finding(Level.WARNING if short else Level.OK, "memory", text + wired(max(one, many), found))


def _copies(needs: Projection, asked: ModelOptions, usable: int, found: Examination) -> int:
    """Bytes that are set apart for pages on their way to the disk, where those are copies: beside a GPU's own
    memory."""
    from chairlift.engine.disk import copies_bytes
    from chairlift.engine.kept import usual_prefix_bytes

    if found.backend != "CUDA" or not asked.engine.prefix_cache_disk_bytes:
        return 0
    kept = asked.engine.prefix_cache_bytes
    return copies_bytes(usual_prefix_bytes(usable, needs.weight_bytes) if kept is None else kept)


def wired(needs: int, found: Examination) -> str:
    """The command that lets a Mac's GPU use more of the memory; empty where it does not matter."""
    from chairlift.engine.doctor import WIRED_LIMIT, wired_limit_for

    if found.wired_limit_mb is None or not found.working_set_bytes or not found.memory_bytes:
        return "."
    limit = wired_limit_for(needs, found.working_set_bytes, found.memory_bytes)
    if limit is None:
        return "."
    return f". This would allow it, until the next start of the machine: sudo sysctl {WIRED_LIMIT}={limit}"


def _port(given: Configuration) -> Iterator[Finding]:
    place = f"{given.host}:{given.port}"
    try:
        listen(given.host, given.port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            yield Finding(Level.FAULT, "port", f"{place} cannot be listened on: {error.strerror or error}.")
        elif answers_as_chairlift(given.port):
            yield Finding(Level.WARNING, "port", f"{place} is taken by {occupant(given.port)}.")
        else:
            yield Finding(Level.FAULT, "port", f"{place} is taken by {occupant(given.port)}.")
    else:
        yield Finding(Level.OK, "port", f"{place} is free.")


def _folders(given: Configuration, found: Examination, *, converts: bool) -> Iterator[Finding]:
    """Those that are written to: whether they can be, and what room there is."""
    from chairlift.engine.models.folders import existing, unwritable

    store = store_path(given.responses_store)
    disk = parse_size(given.prefix_cache_disk) or 0
    prefixes = given.prefix_cache_dir or found.cache_folder
    wanted: list[tuple[str, Path, int]] = [("cache", found.cache_folder, 0)]
    if disk:
        wanted.append(("prefix cache", prefixes, disk))
    if store is not None:
        wanted.append(("responses", store.absolute().parent, 0))
    if given.log_file is not None:
        wanted.append(("log", given.log_file.absolute().parent, 0))
    for what, folder, bound in wanted:
        why = unwritable(folder)
        if why is not None and what == "cache" and not converts:
            yield Finding(Level.OK, what, f"{folder} cannot be written to ({why}), and need not be.")
            continue
        if what == "responses" and not folder.is_dir():  # a start does not make it
            why = "there is no such folder"
        if why is not None:
            yield Finding(Level.FAULT, what, f"{folder} cannot be written to: {why}.")
            continue
        free = shutil.disk_usage(existing(folder)).free
        text = f"{folder}: {size(free)} free"
        if free < FREE_BYTES:
            yield Finding(Level.WARNING, what, f"{text}; the disk is as good as full.")
        elif bound > free:
            yield Finding(Level.WARNING, what, f"{text}, less than the {size(bound)} that it may take.")
        else:
            yield Finding(Level.OK, what, f"{text}.")


def _secrets(given: Configuration) -> Iterator[Finding]:
    for name in Configuration.model_fields:
        if not name.endswith(("key_file", "keyfile")):
            continue
        value = getattr(given, name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                yield _secret_file(path)


def _secret_file(path: Path) -> Finding:
    try:
        status = path.stat()
    except OSError as error:
        return Finding(Level.FAULT, "keys", f"{path} cannot be read: {error.strerror}.")
    if not os.access(path, os.R_OK):
        return Finding(Level.FAULT, "keys", f"{path} cannot be read by this user.")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Finding(Level.FAULT, "keys", f"Others can read {path}: chmod 600 {path}")
    return Finding(Level.OK, "keys", f"{path} is its owner's alone.")


def _files(found: Examination) -> Iterator[Finding]:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        yield Finding(Level.WARNING, "files", f"Only {hard} files may be open: as many clients at most.")
    else:
        count = "any number of" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        yield Finding(Level.OK, "files", f"{count} files may be open.")
    if found.openblas is False:
        yield Finding(Level.WARNING, "BLAS", _slow_blas())


def _slow_blas() -> str:
    from chairlift.server.service.define import OPENBLAS, has_openblas

    lacking = "" if has_openblas() else "install OpenBLAS (Debian: libopenblas0-pthread) and "
    return (
        "mlx computes with the reference BLAS, about 15 times slower than with OpenBLAS: "
        f"{lacking}start the command with LD_PRELOAD={OPENBLAS} before it, as make run and "
        "chairlift service do."
    )
