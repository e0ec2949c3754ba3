"""What is installed from a package is what the sources say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("server", "engine", "cache", "patches")

IMPORT_ALL = """
import importlib, pkgutil, sys
import chairlift
assert "mlx" not in sys.modules and "mlx.core" not in sys.modules, "importing the package needs no mlx"
names = ["chairlift"]
for module in pkgutil.walk_packages(chairlift.__path__, "chairlift.", onerror=sys.exit):
    if module.name != "chairlift.__main__":
        importlib.import_module(module.name)
    names.append(module.name)
from chairlift import LLM, SamplingParams, __version__
assert SamplingParams(max_tokens=3).max_tokens == 3 and LLM.__name__ == "LLM"
print(chairlift.__file__, __version__, *sorted(names), sep="\\n")
"""


def sources() -> dict[str, bytes]:
    """The modules' content by their place in the package."""
    found = {f"chairlift/{path.name}": path for path in (ROOT / "src" / "chairlift").glob("*.py")}
    for folder in FOLDERS:
        found |= {f"chairlift/{path.relative_to(ROOT)}": path for path in (ROOT / folder).rglob("*.py")}
    return {name: path.read_bytes() for name, path in found.items()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", *FOLDERS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", str(copy)]
    ended = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, which borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder / "bin"


def test_the_wheel_holds_every_module_as_a_real_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if not name.startswith(f"chairlift-{version('chairlift')}")
        ]
        packed = {name: archive.read(name) for name in names}
    assert packed.pop("chairlift/py.typed") == b""
    assert packed == sources()


def test_the_sdist_holds_no_links(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/src/")[2]: member for member in archive.getmembers()}
    assert all(member.isfile() or member.isdir() for member in members.values())
    assert set(sources()) <= set(members)


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        information = f"chairlift-{version('chairlift')}.dist-info"
        metadata = archive.read(f"{information}/METADATA").decode()
        licence = archive.read(f"{information}/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    for line in (
        "License-Expression: Apache-2.0",
        "Requires-Python: <3.14,>=3.11",
        "Provides-Extra: cpu",
        "Provides-Extra: cuda12",
        "Provides-Extra: cuda13",
        "Requires-Dist: pip>=23",
    ):
        assert line in metadata.splitlines()


def test_the_command_runs(installed: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [installed / "chairlift", "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, f"chairlift {version('chairlift')}\n"), ended.stderr


def test_every_module_can_be_imported(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    command = [installed / "python", "-c", IMPORT_ALL]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    home, number, *names = ended.stdout.splitlines()
    assert Path(home).is_relative_to(installed.parent)
    assert number == version("chairlift")
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sources()}
    assert set(names) == modules
