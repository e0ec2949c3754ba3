"""One precedence, and messages that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.server.configuration.fields import Configuration, variable_of
from chairlift.server.configuration.read import ConfigurationError, read
from chairlift.server.configuration.types import FloatType


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lift.toml"
    path.write_text("# a comment\nport = 1\nmax_num_seqs = 1\nhost = 'file'\nmax_waiting = 7\n")
    return path


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(file: Path) -> None:
    environment = {"CHAIRLIFT_PORT": "2", "CHAIRLIFT_HOST": "variable", "PORT": "9"}
    outcome = read({"port": 3}, file, environment)
    found = outcome.configuration
    assert (found.port, found.host, found.max_num_seqs, found.max_num_batched_tokens) == (
        3,
        "variable",
        1,
        None,
    )
    assert outcome.origins == {
        "port": "--port",
        "host": "CHAIRLIFT_HOST",
        "max_num_seqs": f"{file}, line 3",
        "max_waiting": f"{file}, line 5",
    }


def test_the_file_is_the_one_named_else_the_environments_else_the_users(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "config.toml"
    monkeypatch.setattr("chairlift.server.configuration.read.default_file", lambda: users)
    other = tmp_path / "other.toml"
    other.write_text("port = 4")
    assert read({}, None, {}).file is None
    users.write_text("port = 5")
    assert read({}, None, {}).configuration.port == 5
    assert read({}, None, {"CHAIRLIFT_CONFIG": str(other)}).configuration.port == 4
    assert read({}, file, {"CHAIRLIFT_CONFIG": str(other)}).configuration.port == 1
    assert read({}, Path("/dev/null"), {}).configuration == Configuration()


def test_the_environment_speaks_in_strings() -> None:
    environment = {
        "CHAIRLIFT_DTYPE": "float16",
        "CHAIRLIFT_ACCESS_LOG": "on",
        "CHAIRLIFT_MEDIA_TIMEOUT": "2.5",
        "CHAIRLIFT_MODEL": "",
        "CHAIRLIFT_CACHE": "/somewhere",
    }
    found = read({}, Path("/dev/null"), environment).configuration
    assert (found.dtype, found.access_log, found.media_timeout) == (FloatType.FLOAT16, True, 2.5)
    assert found.model == Configuration().model


@pytest.mark.parametrize(
    ("flags", "environment", "text", "message"),
    [
        ({}, {"CHAIRLIFT_PORT": "70000"}, "", "CHAIRLIFT_PORT: Input should be less than or equal to 65535."),
        (
            {},
            {"CHAIRLIFT_PORTS": "1"},
            "",
            "CHAIRLIFT_PORTS: there is no such setting; is CHAIRLIFT_PORT meant?",
        ),
        ({}, {}, "port = 1\nprot = 2", "{file}, line 2: there is no setting 'prot'; is port meant?"),
        (
            {},
            {},
            "max-num-seqs = 2",
            "{file}, line 1: there is no setting 'max-num-seqs'; is max_num_seqs meant?",
        ),
        ({}, {}, "[strange]\nport = 2", "{file}, line 1: there is no setting 'strange'."),
        ({}, {}, "\nport = 'x'", "{file}, line 2: port: Input should be a valid integer, unable to parse"),
        ({}, {}, "port 1", "{file} is not TOML: Expected '=' after a key in a key/value pair (at line 1"),
        (
            {},
            {},
            "dtype = 'int4'",
            "{file}, line 1: dtype: Input should be 'float32', 'float16' or 'bfloat16'.",
        ),
        ({"reasoning_parser": "odd"}, {}, "", "--reasoning-parser: 'odd' is unknown; choose from none, "),
        (
            {"prefix_cache_disk": "1GB"},
            {},
            "prefix_cache_ram = 'off'",
            "--prefix-cache-disk: It needs --prefix",
        ),
        (
            {},
            {"CHAIRLIFT_CHAT_TEMPLATE": "/nowhere"},
            "",
            "CHAIRLIFT_CHAT_TEMPLATE: The file '/nowhere' does not",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(
    flags: dict[str, object], environment: dict[str, str], text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "lift.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read(flags, path, environment)
    told = str(refused.value).removeprefix("Invalid value for ")
    assert told.startswith(message.format(file=path)), told


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none.toml cannot be read: No such file"):
        read({}, tmp_path / "none.toml", {})


def test_home_in_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lift.toml").write_text("allow_local_media = '~'")
    assert read({}, tmp_path / "lift.toml", {}).configuration.allow_local_media == tmp_path


def test_a_size_may_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "lift.toml").write_text("prefix_cache_ram = 1000")
    assert read({}, tmp_path / "lift.toml", {}).configuration.prefix_cache_ram == "1000"


def test_every_setting_has_a_variable() -> None:
    defaults = Configuration()
    plain = {
        name: value
        for name in Configuration.model_fields
        if isinstance(value := getattr(defaults, name), int | str)
    }
    environment = {
        variable_of(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in plain.items()
    }
    outcome = read({}, Path("/dev/null"), environment)
    assert outcome.configuration == defaults and set(outcome.origins) == set(plain)


def test_one_value_may_stand_for_an_array(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 8)
    file = tmp_path / "lift.toml"
    file.write_text(
        f"model = 'one'\napi_key_file = '{keys}'\ncors_origin = 'https://chat.example.org'\n"
        "allowed_host = 'llm.example.org'\nforwarded_allow_ips = '10.0.0.1'\nadmin_key = 'boss:abcdefgh'\n"
    )
    file.chmod(0o600)
    found = read({}, file, {}).configuration
    assert found.model == ("one",)
    assert found.api_key_file == (keys,)
    assert found.cors_origin == ("https://chat.example.org",)
    assert found.allowed_host == ("llm.example.org",)
    assert found.forwarded_allow_ips == ("10.0.0.1",)
    assert [key.get_secret_value() for key in found.admin_key] == ["boss:abcdefgh"]
    file.write_text("cors_origin = 5")
    with pytest.raises(ConfigurationError, match="line 1: cors_origin: An array is expected, such as"):
        read({}, file, {})


def test_a_file_of_secrets_that_systemd_hands_over_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode has the group read it, which is no group's right: see `is_private`."""
    file = tmp_path / "config"
    file.write_text("api_key = 'sk-0123456789'\n")
    file.chmod(0o440)
    with pytest.raises(ConfigurationError, match="can be read or changed by others"):
        read({}, file, {})
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert len(read({}, file, {}).configuration.api_key) == 1


@pytest.mark.parametrize("blank", [" ", ",", " , \t"])
def test_an_array_in_the_environment_that_holds_nothing_is_no_way_to_be_without_keys(blank: str) -> None:
    with pytest.raises(ConfigurationError, match="^CHAIRLIFT_API_KEY is set, and holds nothing.$"):
        read({}, Path("/dev/null"), {"CHAIRLIFT_API_KEY": blank})
    assert read({}, Path("/dev/null"), {"CHAIRLIFT_API_KEY": ""}).configuration.api_key == ()
