"""Every command that the documents name is there, with the options that they give it."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main

from chairlift.server.cli.app import app
from tests.bench.scripts import BENCH, script

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(BENCH.glob("*.md")),
]
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?(make|chairlift|python3?(?: -m)?) ([^\n|&;#]+)")
PLACE = re.compile(r"(?:server|engine|cache|patches|bench|tests|docs|docker)/[\w./-]+")
MAKEFILE = (ROOT / "Makefile").read_text()


def code(document: str) -> Iterator[str]:
    """Lines of blocks and spans, each on one line."""
    fenced = re.compile(r"^ *```.*?^ *```", re.M | re.S)
    for block in fenced.findall(document):
        yield from block.replace("\\\n", " ").splitlines()[1:-1]
    rest = fenced.sub("", document)
    for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", rest, re.M):
        yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", rest, flags=re.M)):
        yield " ".join(span.replace(r"\|", "|").split())  # as a table has it


def commands() -> Iterator[Any]:
    seen = set()
    for document in DOCUMENTS:
        for line in code(document.read_text()):
            found = COMMAND.fullmatch(line.strip()) or COMMAND.match(line.strip())
            if found is None:
                continue
            words = found.group(2).split("   ")[0].strip()  # what a block says beside a command
            kind = found.group(1).replace("python3", "python")
            if (kind, words) not in seen and not words.startswith("-"):
                seen.add((kind, words))
                yield pytest.param(kind, words, id=f"{document.name}: {kind} {words[:60]}")


class Parsed(Exception):
    """The script has read its arguments."""


def dry(module: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own parser reads these, and no more of it runs."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> Any:
        parse(parser, argv)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(Parsed):
        module.main()


def recipe(target: str) -> str:
    """Of a target, its lines."""
    assert re.search(rf"^\.PHONY:.* {target}\b", MAKEFILE, re.M), target
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.M)
    assert found is not None
    return found.group(1)


def known_options(words: list[str]) -> None:
    """The command line has these commands and options; what is behind `--` goes to `serve`."""
    if "--" in words:
        known_options(["serve", *words[words.index("--") + 1 :]])
        words = words[: words.index("--")]
    command: Any = typer.main.get_command(app)
    while (group := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        name, *words = words
        assert name in group, name
        command = group[name]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, word


@pytest.mark.parametrize(("kind", "words"), list(commands()))
def test_a_command_is_there(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *given = shlex.split(words)
    if kind == "chairlift":
        known_options([name, *given])
    elif kind == "make":
        more = [shlex.split(each.removeprefix("ARGS=")) for each in given if each.startswith("ARGS=")]
        called = re.search(
            r"bin/python bench/(\w+)\.py(.*) \$\(ARGS\)", recipe(name).replace("$(BIN)", "bin")
        )
        if called:
            dry(script(called[1]), [*shlex.split(called[2]), *sum(more, [])], monkeypatch)
    elif kind == "python" and name.startswith("bench/"):
        dry(script(Path(name).stem), given, monkeypatch)
    elif kind == "python -m" and name.startswith("tests."):
        dry(import_module(name), given, monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_places_in_the_tree_are_there(document: Path) -> None:
    places = [span for span in code(document.read_text()) if PLACE.fullmatch(span)]
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_commands_are_found() -> None:
    found = {(kind, words.split()[0]) for kind, words in (each.values for each in commands())}
    assert {("make", "bench"), ("make", "run"), ("chairlift", "serve")} <= found
    assert {("python", "bench/device.py"), ("python -m", "tests.faults.load")} <= found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("chairlift", "serv"),
        ("chairlift", "serve --modell x"),
        ("chairlift", "service install -- --modell x"),
        ("make", "benches"),
        ("make", 'bench ARGS="--peers nobody"'),
        ("python", "bench/device.py --bath 1"),
        ("python", "bench/compare.py"),
        ("python -m", "tests.faults.load --stream-count 1"),
    ],
)
def test_a_wrong_command_is_found(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ModuleNotFoundError, SystemExit)):
        test_a_command_is_there(kind, words, monkeypatch)
