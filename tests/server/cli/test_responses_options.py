"""Options of `chairlift serve` that say where responses are kept, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.server.cli.app import run
from chairlift.server.served import ServeOptions
from chairlift.server.settings import ResponsesSettings


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ResponsesSettings()),
        (["--responses-store", "memory"], ResponsesSettings()),
        (["--responses-store", "off"], ResponsesSettings(keep=False)),
        (["--responses-store", "./off"], ResponsesSettings(path=Path("off"))),
        (
            [
                *("--responses-store", "a.sqlite", "--responses-limit", "1.5"),
                *("--responses-count", "5", "--responses-days", "0.5"),
            ],
            ResponsesSettings(path=Path("a.sqlite"), max_bytes=3 * 2**19, max_count=5, max_age_s=43200),
        ),
    ],
)
def test_where_responses_are_kept(
    options: list[str], expected: ResponsesSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServeOptions] = []

    def run_server(given: ServeOptions, announce: object, complain: object) -> int:
        served.append(given)
        return 7

    monkeypatch.setattr("chairlift.server.serve.run_server", run_server)
    monkeypatch.setattr("chairlift.server.cli.serve.set_up_logging", lambda *args, **settings: None)
    assert run(["serve", *options]) == 7
    assert [options.settings.responses for options in served] == [expected]
