"""RESULTS.md, and what bench/compare.py says of two servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from chairlift.server.bench import BenchReport
from chairlift.server.bench.client import Measured
from chairlift.server.bench.report import summarize

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """The scripts import each other as scripts do: from their own folder."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture
def results(scripts: None) -> ModuleType:
    import results

    return results


@pytest.fixture
def compare(scripts: None) -> ModuleType:
    import compare

    return compare


def test_a_section_is_replaced_and_the_rest_stays(results: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    results.write_section(path, "one", "first")
    results.write_section(path, "two", "second")
    path.write_text(path.read_text() + "\nby hand\n")
    results.write_section(path, "one", "\nfirst again\n\n")
    assert path.read_text() == (
        results.HEADER.rstrip()
        + "\n\n<!-- one:begin -->\nfirst again\n<!-- one:end -->"
        + "\n\n<!-- two:begin -->\nsecond\n<!-- two:end -->\n\nby hand\n"
    )


def test_markdown_table(results: ModuleType) -> None:
    assert results.table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_device_section(results: ModuleType) -> None:
    run = {
        "machine": {"device": "A card", "versions": "mlx 1", "revision": "abc"},
        "arguments": "--batches 2",
        "throughput": [
            {"model": "m", "batch": 2, "path": "bare", "steady_tok_s": 1000.0, "step_ms_p50": 2.0},
            {
                "model": "m",
                "batch": 2,
                "path": "ours",
                "batching": "flat",
                "steady_tok_s": 930.0,
                "joins_tok_s": 800.0,
                "step_ms_p50": 2.162,
            },
            {"model": "m", "batch": 4, "path": "ours", "error": "out of memory"},
        ],
        "lengths": [
            {
                "model": "m",
                "rows": "two",
                "path": "ours",
                "step_ms_p50": 3.0,
                "kv_bytes": 11e9,
                "need_bytes": 10e9,
                "peak_bytes": 12e9,
                "cut": True,
            }
        ],
    }
    text = results.device_section(run)
    assert "`python bench/device.py --batches 2`" in text
    assert "| m | 2 | bare | 1,000 | 1.00 | – | – | 2.00 |" in text
    assert "| m | 2 | ours (flat) | 925 | 0.93 | 800 | 0.80 | 2.16 |"
    assert "| m | 4 | ours | – | – | – | – | – |" in text
    assert "| m | two | ours (cut) | 3.00 | 11.00 | 1.10 | 12.0 |" in text
    assert "- m 4 ours: out of memory" in text


def run_of(compare: ModuleType, peer: str, rate: float, stall: float, text: str = "a b") -> object:
    """One request of 4 tokens at `rate` tokens a second, with one gap of `stall` seconds."""
    measured = Measured(
        kind="short",
        max_tokens=4,
        started=0.0,
        finished=4 / rate,
        chunk_times=[1.0, 1.0 + stall],
        text=text,
        finish_reason="length",
        prompt_tokens=9,
        completion_tokens=4,
    )
    workloads = {"mixed": summarize([measured], 4 / rate)}
    return compare.Run(peer, BenchReport("http://x", "m", 0, 6, 24, 1.0, workloads), 2.0, 3 * 10**9)


def test_ratios(compare: ModuleType) -> None:
    ours = run_of(compare, "chairlift", 3.0, 0.5)
    theirs = run_of(compare, "other", 2.0, 4.0)
    assert compare.ratios(ours, theirs) == [
        "mixed: chairlift against other: tok/s 1.50 ×, longest stall 8.0 × shorter, TTFT p50 1.0 × shorter; "
        "1 of 1 answers the same"
    ]
    assert "0 of 1 answers the same" in compare.ratios(ours, run_of(compare, "other", 2.0, 4.0, "c"))[0]


def test_section_names_no_place(compare: ModuleType, tmp_path: Path) -> None:
    arguments = compare.parse(["--workload", "mixed", "--requests", "1", "--model", str(tmp_path / "tiny")])
    runs = [run_of(compare, "chairlift", 3.0, 0.5), run_of(compare, "mlx_lm.server", 2.0, 4.0)]
    text = compare.section(runs, arguments)
    assert str(tmp_path) not in text and "Model: tiny." in text
    assert "--workload mixed --clients 6 --max-tokens 24 --rate 1 --seed 0 --requests 1`" in text
    assert "| mixed | chairlift | 3.0 | 1 / 1 / 1 | 0.5 / 0.5 / 0.5 | 0.167 | 1 | 0 | 4 |" in text
    assert "| short | mlx_lm.server | 1 | 9–9 | 1 / 1 / 1 | 4 / 4 / 4 | 2 / 2 / 2 |" in text
    assert "| chairlift | 2.0 | 3.00 |" in text


def test_a_server_that_does_not_start_says_why(compare: ModuleType, tmp_path: Path) -> None:
    import peers

    broken = peers.Peer(
        name="broken",
        package="chairlift",
        command=lambda folder, port: [sys.executable, "-c", "raise SystemExit('no such model')"],
        ready_path="/health",
        model=None,
    )
    ended = pytest.raises(peers.CompareError, match="^broken ended with code 1: no such model$")
    with ended, peers.serving(broken, tmp_path):
        pass
