"""What a machine without network needs to serve: `python bench/wheels.py` prints NAME==VERSION for pip.

The packages that this environment's Chairlift needs, with what these need in turn, for Python `--python` on
Linux. `--without` leaves out what the machine has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_FOR_SERVING = (
    *("datasets", "dill", "multiprocess", "opencv-python", "pandas", "pyarrow", "scipy", "sounddevice"),
)
"""What mlx-vlm asks for beside that, and imports only for training, sound and video."""


def needed(name: str, python: str, without: Sequence[str]) -> dict[str, str]:
    """Versions by name of `name` and all that it needs, as they are installed here."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found: dict[str, str] = {}
    todo = [name]
    while todo:
        wanted = canonicalize_name(todo.pop())
        if wanted in found or wanted in without:
            continue
        try:
            package = distribution(wanted)
        except PackageNotFoundError:
            continue
        found[wanted] = package.version
        requirements = map(Requirement, package.requires or ())
        todo += [
            each.name
            for each in requirements
            if each.marker is None or each.marker.evaluate({**environment, "extra": ""})
        ]
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--without", nargs="*", default=[], help="packages that it has")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    without = {canonicalize_name(name) for name in (*arguments.without, *NOT_FOR_SERVING)}
    found = needed("chairlift", arguments.python, sorted(without))
    del found["chairlift"]
    found["mlx-cuda-13"] = found["mlx"]
    print("\n".join(f"{name}=={version}" for name, version in sorted(found.items())))


if __name__ == "__main__":
    main()
