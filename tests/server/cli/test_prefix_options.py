"""Options of `chairlift serve` that say where prefixes are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.server.cli.app import run
from chairlift.server.served import ServeOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What was to be served."""
    found: list[ServeOptions] = []

    def run_server(given: ServeOptions, announce: object, complain: object) -> int:
        found.append(given)
        return 7

    monkeypatch.setattr("chairlift.server.serve.run_server", run_server)
    monkeypatch.setattr("chairlift.server.cli.serve.set_up_logging", lambda *args, **settings: None)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (None, 0, None)),
        (["--prefix-cache-disk", "off", "--prefix-cache-ram", "off"], (0, 0, None)),
        (["--prefix-cache-disk", "100GB"], (None, 10**11, None)),
        (
            ["--prefix-cache-disk", "1MiB", "--prefix-cache-ram", "2kB", "--prefix-cache-dir", "here"],
            (2000, 2**20, Path("here")),
        ),
    ],
)
def test_where_prefixes_are_kept(
    options: list[str], expected: tuple[int | None, int, Path | None], served: list[ServeOptions]
) -> None:
    assert run(["serve", *options]) == 7
    (given,) = served
    (model,) = given.models
    config = model.engine
    assert (config.prefix_cache_bytes, config.prefix_cache_disk_bytes, config.prefix_cache_folder) == expected


@pytest.mark.parametrize(
    "options",
    [
        ["--prefix-cache-disk", "auto"],
        ["--prefix-cache-disk", "much"],
        ["--prefix-cache-disk", "1GB", "--prefix-cache-ram", "off"],
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    options: list[str], served: list[ServeOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *options]) == 2
    assert "--prefix-cache-disk" in capsys.readouterr().err and served == []
