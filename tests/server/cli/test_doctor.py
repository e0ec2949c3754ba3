"""`chairlift doctor`: what it prints."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from chairlift.engine.doctor import Change, Examination
from chairlift.server.cli.app import run
from chairlift.server.cli.doctor import show

FOUND = Examination(
    versions={"mlx": "0.32.4", "mlx-vlm": None},
    python="3.12.1 on arm64",
    backend="Metal",
    device="Apple M4",
    memory_bytes=64 * 2**30,
    working_set_bytes=48 * 2**30,
    openblas=None,
    cache_folder=Path("/caches/chairlift"),
    cache_bytes=3 * 2**20,
    changes=(Change("gemma2", "mlx-lm", "applied", "masks of four axes"),),
)


def shown(found: Examination) -> str:
    text = StringIO()
    show(found, Console(file=text, width=200, highlight=False))
    return text.getvalue()


def test_what_was_found() -> None:
    lines = [line.rstrip() for line in shown(FOUND).splitlines()]
    assert lines[:5] == [
        "versions mlx 0.32.4, mlx-vlm absent",
        "python   3.12.1 on arm64",
        "device   Metal, Apple M4",
        "memory   64.0 GiB, of which 48.0 GiB may be in use at once",
        "cache    /caches/chairlift (3.0 MiB)",
    ]
    assert lines[-1].split() == ["mlx-lm", "gemma2", "applied", "masks", "of", "four", "axes"]


def test_unknown_memory_is_said_to_be() -> None:
    assert "memory   unknown\n" in shown(replace(FOUND, memory_bytes=None, working_set_bytes=None))


def test_a_slow_blas_comes_with_its_cure() -> None:
    assert "BLAS     OpenBLAS\n" in shown(replace(FOUND, openblas=True))
    assert "LD_PRELOAD=libopenblas.so.0" in shown(replace(FOUND, openblas=False))
    assert "BLAS" not in shown(FOUND)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("versions chairlift ") and err == ""
