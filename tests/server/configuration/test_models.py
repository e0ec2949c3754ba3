"""Which models a configuration asks for, and with what settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.server.cli.app import run
from chairlift.server.configuration.read import ConfigurationError, read
from chairlift.server.configuration.serving import check_names, model_options
from chairlift.server.models.model import Use
from chairlift.server.served import ModelOptions
from chairlift.server.settings import ParserSettings

NONE = Path("/dev/null")


def options(flags: dict[str, object], text: str = "", folder: Path | None = None) -> list[ModelOptions]:
    file = NONE
    if folder is not None:
        file = folder / "lift.toml"
        file.write_text(text)
    return list(model_options(read(flags, file, {}).configuration))


def test_without_a_word_the_embedded_one() -> None:
    assert options({}) == [ModelOptions()]
    assert options({"served_model_name": ("up", "down")}) == [ModelOptions(name="up", aliases=("down",))]


def test_several_flags_with_and_without_names(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    found = options({"model": ("org/x", "y=org/z", str(odd)), "embedding_model": "org/e"})
    assert [(each.model, each.name, each.use) for each in found] == [
        ("org/x", None, None),
        ("org/z", "y", None),
        (str(odd), None, None),
        ("org/e", None, Use.EMBEDDING),
    ]


def test_a_table_says_what_is_different(tmp_path: Path) -> None:
    text = """
max_num_seqs = 8
dtype = "float16"
load = "demand"
idle_unload = 60
reasoning_parser = "qwen3"
[[models]]
name = "one"
aliases = "uno"
pin = true
load = "startup"
idle_unload = 0
max_num_seqs = 1
tool_call_parser = "hermes"
defaults = { temperature = 0.5, top_k = 3 }
[[models]]
model = "org/two"
dtype = "float32"
prefix_cache_ram = "1MB"
"""
    one, two = options({}, text, tmp_path)
    assert one == ModelOptions(
        name="one",
        aliases=("uno",),
        dtype="float16",
        parsers=ParserSettings("qwen3", "hermes"),
        engine=EngineConfig(max_num_seqs=1),
        defaults={"temperature": 0.5, "top_k": 3},
        pinned=True,
    )
    assert two == ModelOptions(
        model="org/two",
        dtype="float32",
        engine=EngineConfig(max_num_seqs=8, prefix_cache_bytes=10**6),
        at_start=False,
        idle_unload_s=60.0,
    )
    assert [each.model for each in options({"model": ("org/x",)}, text, tmp_path)] == [
        "org/x",
        None,
        "org/two",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]\nidle = 3", "models[0].idle: There is no such setting."),
        (
            "[[models]]\n[[models]]\nmax_num_seqs = 0",
            "models[1].max_num_seqs: Input should be greater than or",
        ),
        (
            "[[models]]\ndefaults = { temperature = 3 }",
            "models[0].defaults.temperature: Input should be less",
        ),
        ("[[models]]\nreasoning_parser = 'odd'", "models[0].reasoning_parser: 'odd' is unknown; choose from"),
        (
            "model = ['a', 'b']\nserved_model_name = 'c'",
            "served_model_name: It goes with one --model; several",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        options({}, text, tmp_path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ([{"model": "one"}, {"model": "two", "aliases": ["one"]}], "one"),
        ([{"model": "one", "aliases": ["x"]}, {"model": "two", "aliases": ["x"]}], "x"),
        ([{"model": "one", "aliases": ["one"]}], "one"),
        ([{"model": "one", "aliases": ["x", "x"]}], "x"),
        ([{"model": "one"}, {"model": "two", "name": "one"}], "one"),
        ([{"model": "one"}, {"model": "within/one"}], "one"),
        ([{"model": "one", "name": "file"}, {"model": "file.gguf"}], "file"),
        ([{"model": "org/x"}, {"model": "org/x", "load": "demand"}], "org/x"),
        ([{}, {}], "SmolLM2-135M-Instruct"),
    ],
)
def test_a_name_means_one_model(
    tables: list[dict[str, object]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two", "within/one"):
        Path(folder).mkdir(parents=True)
    Path("file.gguf").touch()
    with pytest.raises(ConfigurationError, match=f"^Two models would be called {name}, "):
        check_names(options({"models": tables}))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[[models]]\nmax_num_seqs = 2\n[[models]]\n\nmax_num_seqs = 0", 5),
        ("port = 1\n[[models]]\nload = 'later'\n[[models]]\nload = 'demand'", 3),
        ("[[models]]\n[[models]]\nodd = 1", 3),
        ("[[models]]\n[[models]]\n[models.defaults]\ntemperature = 3", 2),
        ("models = [{ max_num_seqs = 0 }]\nmax_num_seqs = 3", 1),
    ],
)
def test_the_line_is_the_tables_own(text: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"lift.toml, line {line}: models\["):
        options({}, text, tmp_path)


def test_models_of_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    given = ("org/x", "y=org/x", str(tmp_path / "one"), str(tmp_path / "nowhere"))
    check_names(options({"model": given, "embedding_model": "org/e"}))


@pytest.mark.parametrize(
    "command", [["serve"], ["config"], ["doctor"], ["service", "install", "--print", "--"]]
)
def test_two_of_one_name_are_refused_by_every_command(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--config", "/dev/null", "--model", "x=org/one", "--model", "x=org/two"]) == 2
    assert capsys.readouterr() == (
        "",
        "chairlift: Two models would be called x, or one of them twice; a name means one model.\n",
    )
