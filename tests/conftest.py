"""How tests spread over processes: a file's tests share one, and so do all that share the real server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        folder = Path(item.path).parent
        group = folder.name if folder.name == "served" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
