"""`chairlift doctor`: what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from chairlift.engine.doctor import Change, Examination
from chairlift.server.cli.app import run
from chairlift.server.cli.doctor import as_json, show, show_findings
from chairlift.server.configuration.fields import Configuration
from chairlift.server.diagnosis import Finding, Level

FOUND = Examination(
    versions={"mlx": "0.32.4", "mlx-vlm": None},
    python="3.12.1 on arm64",
    backend="Metal",
    device="Apple M4",
    memory_bytes=64 * 2**30,
    working_set_bytes=48 * 2**30,
    usable_bytes=45 * 2**30,
    wired_limit_mb=0,
    openblas=None,
    cache_folder=Path("/caches/chairlift"),
    cache_bytes=3 * 2**20,
    changes=(Change("gemma2", "mlx-lm", "applied", "masks of four axes"),),
)


def shown(found: Examination, *, verbose: bool = False) -> str:
    text = StringIO()
    show(found, Console(file=text, width=200, highlight=False), verbose=verbose)
    return text.getvalue()


def test_what_was_found() -> None:
    lines = [line.rstrip() for line in shown(FOUND).splitlines()]
    assert lines == [
        "versions mlx 0.32.4, mlx-vlm absent",
        "python   3.12.1 on arm64",
        "device   Metal, Apple M4",
        "memory   68.7 GB, of which 51.5 GB may be in use at once; a server uses up to 48.3 GB",
        "cache    /caches/chairlift (3.15 MB)",
        "wired    the system's own choice (iogpu.wired_limit_mb)",
        "patches  1 of 1 in place (--verbose lists them)",
    ]


CHANGES = (
    Change("gemma2", "mlx-lm", "applied", "masks of four axes"),
    Change("llama4", "mlx-lm", "not applied", "mlx-lm 9.0 is not [0.32]"),
    Change("phi", "mlx-lm", "applied", "keys are cast", needless=True),
    Change("merge", "mlx-lm", "on demand", "drops padding"),
    Change("extract", "mlx-lm", "not needed", "raises"),
)


@pytest.mark.parametrize(
    ("verbose", "names"),
    [(False, ["llama4", "phi"]), (True, ["gemma2", "llama4", "phi", "merge", "extract"])],
)
def test_patches_are_counted_and_only_the_odd_ones_listed(verbose: bool, names: list[str]) -> None:
    lines = shown(replace(FOUND, changes=CHANGES), verbose=verbose).splitlines()
    more = "" if verbose else " (--verbose lists them)"
    assert lines[6:8] == [f"patches  2 of 3 in place, 1 more on demand{more}", ""]
    assert [line.split()[:2] for line in lines[8:]] == [
        ["package", "change"],
        *(["mlx-lm", n] for n in names),
    ]
    (odd,) = (line for line in lines if "llama4" in line)
    assert odd.split()[2:] == ["not", "applied", "mlx-lm", "9.0", "is", "not", "[0.32]"]
    assert "applied, needless?" in next(line for line in lines if "keys are cast" in line)


def test_unknown_memory_is_said_to_be() -> None:
    assert "memory   unknown\n" in shown(replace(FOUND, memory_bytes=None, working_set_bytes=None))


def test_blas_and_wired_limit() -> None:
    assert "BLAS     OpenBLAS\n" in shown(replace(FOUND, openblas=True))
    assert "BLAS     reference BLAS\n" in shown(replace(FOUND, openblas=False))
    assert "BLAS" not in shown(FOUND)
    assert "wired    57,344 MiB (iogpu.wired_limit_mb)\n" in shown(replace(FOUND, wired_limit_mb=57344))
    assert "wired" not in shown(replace(FOUND, wired_limit_mb=None))


FAULT = Finding(Level.FAULT, "port", "127.0.0.1:1 is taken by nginx, pid 1.")
WARNING = Finding(Level.WARNING, "files", "Only 256 files may be open.")


def test_findings() -> None:
    text = StringIO()
    show_findings([FAULT, WARNING], Console(file=text, width=20, highlight=False))
    assert text.getvalue().splitlines() == [
        "",
        "chairlift serve with these options:",
        "fault    port         127.0.0.1:1 is taken by nginx, pid 1.",
        "warning  files        Only 256 files may be open.",
    ]


def test_json() -> None:
    told = json.loads(as_json(FOUND, [FAULT]))
    assert (told["cache_folder"], told["memory_bytes"]) == ("/caches/chairlift", 64 * 2**30)
    assert told["findings"] == [{"level": "fault", "what": "port", "text": FAULT.text}]
    assert told["changes"][0]["name"] == "gemma2"


@pytest.mark.parametrize(("found", "code"), [([], 0), ([WARNING], 0), ([WARNING, FAULT], 1)])
def test_the_command(
    found: list[Finding], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[int] = []

    def diagnose(configuration: Configuration, examined: Examination) -> list[Finding]:
        given.append(configuration.port)
        return found

    monkeypatch.setattr("chairlift.server.cli.doctor.diagnose", diagnose)
    monkeypatch.setattr("chairlift.engine.doctor.examine", lambda: FOUND)
    assert run(["doctor", "--config", "/dev/null", "--port", "9000"]) == code
    out, err = capsys.readouterr()
    assert out.startswith("versions mlx 0.32.4") and err == ""
    assert "gemma2" not in out
    assert run(["doctor", "--verbose", "--config", "/dev/null", "--port", "9002"]) == code
    assert "gemma2" in capsys.readouterr().out
    assert run(["doctor", "--json", "--config", "/dev/null", "--port", "9001"]) == code
    assert json.loads(capsys.readouterr().out)["findings"] == json.loads(as_json(FOUND, found))["findings"]
    assert given == [9000, 9002, 9001]
