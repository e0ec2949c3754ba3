"""`chairlift config` prints a file that says the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.server.cli.app import run
from chairlift.server.configuration.read import read
from chairlift.server.configuration.written import toml, written


def test_the_outcome_read_again_is_the_same(tmp_path: Path) -> None:
    flags = {
        "model": 'a "model"',
        "port": 81,
        "dtype": "float16",
        "prefix_cache_dir": tmp_path,
        "access_log": True,
    }
    outcome = read(flags, Path("/dev/null"), {"CHAIRLIFT_MAX_STEP_MS": "7.5"})
    text = written(outcome)
    path = tmp_path / "again.toml"
    path.write_text(text)
    assert read({}, path, {}).configuration == outcome.configuration
    for line in (
        "port = 81  # --port",
        "max_step_ms = 7.5  # CHAIRLIFT_MAX_STEP_MS",
        "max_waiting = 256  # default",
        "# max_model_len is not set",
    ):
        assert line in text.splitlines()


def test_config_takes_the_options_of_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lift.toml"
    path.write_text("port = 4\nhost = 'h'")
    assert run(["config", "--config", str(path), "--port", "5"]) == 0
    out, err = capsys.readouterr()
    found = tomllib.loads(out)
    assert (found["port"], found["host"], err) == (5, "h", "")
    assert f"# Read from {path}" in out and f'host = "h"  # {path}, line 2' in out


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    pem = tmp_path / "pem"
    pem.touch()
    given = {"ssl_certfile": pem, "ssl_keyfile_password": "hush", "api_key": ("hushhush",)}
    text = written(read(given, Path("/dev/null"), {}))
    assert "hush" not in text
    assert '# ssl_keyfile_password = "**********"  # --ssl-keyfile-password' in text.splitlines()
    assert '# api_key = ["**********"]  # --api-key' in text.splitlines()
    assert "admin_key = []  # default" in text.splitlines()


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_values_are_toml(value: object) -> None:
    assert tomllib.loads(f"value = {toml(value)}") == {"value": value}
