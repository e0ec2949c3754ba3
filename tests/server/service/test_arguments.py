"""What is served here and now is served by a service, which has no shell, home or folder behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.exceptions import TyperException

from chairlift.server.service import arguments
from chairlift.server.service.arguments import outcome_of, serve_words
from chairlift.server.service.errors import ServiceFault

Patch = pytest.MonkeyPatch
NO_FILE = ["--config", "/dev/null"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(*words: str) -> list[str]:
    return list(serve_words(outcome_of(words), Path.cwd()))


def test_no_flags_are_no_flags_and_no_file() -> None:
    assert words_of(*NO_FILE) == NO_FILE


def test_paths_become_absolute(here: Path) -> None:
    (here / "model").mkdir()
    (here / "template").touch()
    given = ["--model", "model", "--chat-template", "./template", "--prefix-cache-dir", "../kept"]
    given += ["--responses-store", "r.sqlite", "--embedding-model", "org/name"]
    expected = {
        "--model": here / "model",
        "--chat-template": here / "template",
        "--prefix-cache-dir": here / "../kept",
        "--responses-store": here / "r.sqlite",
        "--embedding-model": "org/name",
        "--config": "/dev/null",
    }
    found = words_of(*NO_FILE, *given)
    assert dict(zip(found[::2], found[1::2], strict=True)) == {
        name: str(value) for name, value in expected.items()
    }


def test_models_with_names(here: Path) -> None:
    (here / "model").mkdir()
    given = ["--model", "up=model", "--model", "down=org/name", "--model", "model"]
    expected = ["--model", f"up={here / 'model'}", "--model", "down=org/name", "--model", str(here / "model")]
    assert words_of(*NO_FILE, *given) == [*NO_FILE, *expected]
    (here / "lift.toml").write_text("[[models]]\nmodel = 'model'")
    with pytest.raises(ServiceFault, match="must be an absolute path"):
        words_of("--config", "lift.toml")


def test_words_that_are_no_paths_stay(here: Path) -> None:
    (here / "docs").mkdir()
    given = ["--served-model-name", "docs", "--responses-store", "off", "--host", "::1", "--dtype", "float16"]
    found = words_of(*NO_FILE, *given)
    assert sorted(found) == sorted([*NO_FILE, *given])


def test_the_environment_is_written_down_too(monkeypatch: Patch) -> None:
    for name, value in (("PORT", "9000"), ("ACCESS_LOG", "true"), ("ALLOW_PRIVATE_MEDIA", "no")):
        monkeypatch.setenv(f"CHAIRLIFT_{name}", value)
    found = words_of(*NO_FILE, "--max-waiting", "3")
    assert sorted(found) == sorted(
        [*NO_FILE, "--max-waiting", "3", "--port", "9000", "--access-log", "--no-allow-private-media"]
    )


def test_a_file_is_named_and_its_values_are_not_repeated(here: Path) -> None:
    (here / "lift.toml").write_text("port = 9000\nmax_waiting = 5\n")
    found = words_of("--config", "lift.toml", "--max-waiting", "3")
    assert found == ["--config", str(here / "lift.toml"), "--max-waiting", "3"]


def test_a_relative_path_in_a_file_is_refused(here: Path) -> None:
    (here / "kept").mkdir()
    (here / "lift.toml").write_text("port = 1\nprefix_cache_dir = 'kept'\n")
    with pytest.raises(ServiceFault, match=r"lift\.toml, line 2: prefix_cache_dir must be an absolute path"):
        words_of("--config", "lift.toml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port"),
        (["--prot", "1"], "--prot"),
        (["--chat-template", "/nowhere"], "--chat-template"),
        (["--prefix-cache-ram", "much"], "--prefix-cache-ram"),
        (["--config", "/nowhere.toml"], "--config"),
        (["extra"], "extra"),
        (["--help"], "no use for --help"),
    ],
)
def test_what_serve_would_refuse_is_refused_first(words: list[str], message: str) -> None:
    with pytest.raises(TyperException) as refused:
        outcome_of(words)
    assert message in refused.value.format_message()


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "--port": st.integers(0, 65535).map(str),
        "--host": st.sampled_from(["::", "127.0.0.1", "-odd"]),
        "--served-model-name": st.text(
            st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8
        ),
        "--drain-timeout": st.floats(0, 1e6).map(str),
        "--watchdog": st.floats(0, 1e6).map(str),
        "--dtype": st.sampled_from(["float32", "bfloat16"]),
        "--prefix-cache-disk": st.sampled_from(["off", "8GB", "512MiB", "1000"]),
        "--tool-call-parser": st.sampled_from(["none", "hermes"]),
        "--log-level": st.sampled_from(["debug", "error"]),
    },
)


@settings(max_examples=20, deadline=None)
@given(SETTINGS)
def test_the_same_settings_come_of_what_is_written(flags: dict[str, str]) -> None:
    given = [*NO_FILE, *(word for pair in flags.items() for word in pair)]
    outcome = outcome_of(given)
    written = serve_words(outcome, Path("/somewhere"))
    assert outcome_of(written).configuration == outcome.configuration


def test_no_secret_is_written_into_a_definition(here: Path, monkeypatch: Patch) -> None:
    """By flag, by variable, and by a file that others can read."""
    key = "0123456789abcdef0123456789abcdef"
    with pytest.raises(ServiceFault, match="--api-key is a secret, and everybody.*: --api-key-file FILE, or"):
        words_of(*NO_FILE, "--api-key", key)
    monkeypatch.setenv("CHAIRLIFT_API_KEY", key)
    with pytest.raises(ServiceFault, match="CHAIRLIFT_API_KEY is a secret"):
        words_of(*NO_FILE)
    monkeypatch.delenv("CHAIRLIFT_API_KEY")
    (here / "pem").touch()
    with pytest.raises(
        ServiceFault, match="--ssl-keyfile-password is a secret.*name that: a file of settings"
    ):
        words_of(*NO_FILE, "--ssl-certfile", "pem", "--ssl-keyfile-password", "word")
    file = here / "lift.toml"
    file.write_text(f"api_key = '{key}'\n")
    file.chmod(0o644)
    with pytest.raises(TyperException, match=f"chmod 600 {file}"):
        words_of("--config", str(file))
    file.chmod(0o600)
    assert words_of("--config", str(file)) == ["--config", str(file)]


def test_a_line_break_cannot_be_written() -> None:
    with pytest.raises(ServiceFault, match="line break"):
        words_of(*NO_FILE, "--served-model-name", "a\nb")


def test_files_of_secrets_have_names_of_their_own(here: Path, monkeypatch: Patch) -> None:
    class Given:
        file = Path("lift.toml")

        class configuration:
            api_key_file = (Path("a"), Path("/b"))
            ssl_keyfile = None
            ssl_certfile = Path("c")

    fields = dict.fromkeys(("port", "api_key_file", "ssl_keyfile", "ssl_certfile"))
    monkeypatch.setattr(arguments.Configuration, "__pydantic_fields__", fields)
    assert list(arguments.secret_files(Given, here)) == [  # type: ignore[arg-type]
        ("config", here / "lift.toml"),
        ("api-key-file", here / "a"),
        ("api-key-file-2", Path("/b")),
        ("ssl-certfile", here / "c"),
    ]
