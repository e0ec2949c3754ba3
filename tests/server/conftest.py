"""The server without what the user's own machine says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chairlift.server.configuration.read import FILE_VARIABLE, OTHER_VARIABLES, PREFIX


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a configuration file of the user's, nor variables."""
    monkeypatch.setattr(
        "chairlift.server.configuration.read.default_file", lambda: tmp_path / "none" / "config.toml"
    )
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        if name == FILE_VARIABLE or name not in OTHER_VARIABLES:
            monkeypatch.delenv(name)
