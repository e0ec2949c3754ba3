"""Programs that tests ask whether they understand our files."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FETCHED = ROOT / "build" / "prometheus" / "usr" / "bin"
"""Where `make test` puts Prometheus, where the system has none."""


def tool(name: str) -> str:
    """Its path. Skips the test where it is not to be had."""
    places = (None, sysconfig.get_path("scripts"), str(FETCHED))
    found = next((path for place in places if (path := shutil.which(name, path=place))), None)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus; `make test` fetches it)")
    return found


def passes(*command: str, given: str = "") -> None:
    """It ends with 0."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
