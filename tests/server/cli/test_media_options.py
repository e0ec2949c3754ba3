"""Options of `chairlift serve` that say where images may come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.server.cli.app import run
from chairlift.server.served import ServeOptions
from chairlift.server.settings import MediaSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """Options of `serve`, instead of a server that ends with exit code 7."""
    options: list[ServeOptions] = []

    def run_server(given: ServeOptions, announce: object, complain: object) -> int:
        options.append(given)
        return 7

    monkeypatch.setattr("chairlift.server.serve.run_server", run_server)
    monkeypatch.setattr("chairlift.server.cli.serve.set_up_logging", lambda *args, **settings: None)
    return options


def test_serve_opens_where_images_may_come_from(served: list[ServeOptions], tmp_path: Path) -> None:
    options = ["--allow-local-media", str(tmp_path), "--allow-private-media"]
    assert run(["serve", *options, "--media-timeout", "2.5", "--media-limit", "1"]) == 7
    media = MediaSettings(
        local_folder=tmp_path, allow_private=True, timeout_s=2.5, max_bytes=2**20, max_total_bytes=2**22
    )
    assert [options.settings.media for options in served] == [media]


def test_a_folder_for_images_must_be_there(
    served: list[ServeOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in ("nowhere", "file"):
        assert run(["serve", "--allow-local-media", str(tmp_path / place)]) != 0
        assert "--allow-local-media" in capsys.readouterr().err
    assert served == []
