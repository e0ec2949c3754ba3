"""The scripts of bench/, which import each other as scripts do: from their own folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def script(name: str) -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(BENCH))
