"""bench/settings.py and bench/constraints.py, run whole on a model that is tiny."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tests.bench.scripts import script

decode, device_models = script("decode"), script("device_models")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "settings",
            [
                "| plain, greedy | ",
                "| the first, every second row under a schema | ",
                "| greedy, logprobs 0 to 5 | ",
            ],
        ),
        ("constraints", ["| plain | ", "| all under the schema | ", "Filling 16 masks: "]),
    ],
)
def test_a_section_is_written(
    name: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = device_models.TINY_SHAPES["llama-8b"]
    tiny = replace(tiny, config={**tiny.config, "vocab_size": 512})
    monkeypatch.setitem(decode.SHAPES, "llama-8b", tiny)
    path = tmp_path / "RESULTS.md"
    given = ["--shape", "llama-8b", "--rounds", "1", "--steps", "1", "--results", str(path)]
    monkeypatch.setattr(sys, "argv", [name, *given])
    script(name).main()
    text = path.read_text()
    assert f"<!-- {name}-llama-8b:begin -->" in text
    assert f"`python bench/{name}.py --shape llama-8b --rounds 1 --steps 1 --prompt 8`; " in text
    for line in lines:
        assert f"\n{line}" in text
