"""The figures, against values worked out by hand."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from chairlift.server.bench.client import Measured
from chairlift.server.bench.report import BenchReport, Spread, percentile, print_report, summarize


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([7.0], 95, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),  # unsorted; halfway between 2 and 3
        ([1.0, 2.0, 3.0, 4.0], 25, 1.75),  # position 0.75
        ([10.0, 20.0, 30.0, 40.0, 50.0], 95, 48.0),  # position 3.8: 40 + 0.8 * 10
        ([float(n) for n in range(101)], 95, 95.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected, abs=1e-12)


def test_percentile_leaves_its_input_alone() -> None:
    values = [3.0, 1.0, 2.0]
    percentile(values, 50)
    assert values == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile(values, percent)


def test_spread_of_nothing_is_none() -> None:
    assert Spread.of([]) is None


def answered(**changes: object) -> Measured:
    """Started at 10 s, content at 11, 11.5 and 13.5 s, done at 14 s; 5 tokens by usage."""
    measured = Measured(
        kind="short",
        max_tokens=5,
        started=10.0,
        finished=14.0,
        chunk_times=[11.0, 11.5, 13.5],
        text="abc",
        finish_reason="length",
        prompt_tokens=7,
        completion_tokens=5,
    )
    for name, value in changes.items():
        setattr(measured, name, value)
    return measured


def figures(spread: Spread | None) -> list[float]:
    assert spread is not None
    return [spread.p50, spread.p95, spread.max, spread.count]


def test_one_request() -> None:
    measured = answered()
    assert measured.ttft == 1.0
    assert measured.gaps == [0.5, 2.0]
    assert measured.e2e == 4.0
    assert measured.tokens == 5
    assert measured.seconds_per_token == pytest.approx(2.5 / 4)


def test_without_usage_a_chunk_counts_as_a_token() -> None:
    measured = answered(completion_tokens=None)
    assert measured.tokens == 3
    assert measured.seconds_per_token == pytest.approx(2.5 / 2)


@pytest.mark.parametrize("times", [[], [11.0]])
def test_time_per_token_needs_two_chunks(times: list[float]) -> None:
    assert answered(chunk_times=times).seconds_per_token is None


def test_summary() -> None:
    second = answered(
        started=10.0,
        finished=13.0,
        chunk_times=[13.0],
        completion_tokens=1,
        cached_tokens=4,
        finish_reason="stop",
    )
    failed = answered(error="HTTP 429", detail="The queue is full.", chunk_times=[10.5, 19.0])
    report = summarize([answered(), second, failed], wall=8.0)
    assert report.requests == 3
    assert report.succeeded == 2
    assert report.errors == {"HTTP 429": 1}
    assert report.prompt_tokens == 14
    assert report.cached_tokens == 4
    assert report.completion_tokens == 6
    assert report.output_tokens_per_s == 0.75
    assert report.chunks == 4
    assert figures(report.ttft_s) == pytest.approx([2.0, 2.9, 3.0, 2])  # of 1 and 3
    assert figures(report.itl_s) == pytest.approx([1.25, 1.925, 2.0, 2])  # of 0.5 and 2, none of the failed
    assert figures(report.e2e_s) == pytest.approx([3.5, 3.95, 4.0, 2])
    assert report.finish_reasons == {"length": 1, "stop": 1}
    assert "HTTP 429: The queue is full." in report.notes
    assert "1 answers ended before max_tokens." in report.notes
    assert [detail.longest_gap_s for detail in report.details] == [2.0, None, 8.5]


def test_notes_say_how_tokens_were_counted() -> None:
    assert "1 answers came without usage: their tokens are counted by chunks." in (
        summarize([answered(completion_tokens=None)], 1.0).notes
    )
    assert "1.7 tokens a chunk: ITL is between chunks, not between tokens." in (
        summarize([answered()], 1.0).notes
    )
    assert summarize([answered(completion_tokens=3)], 1.0).notes == []


def test_summary_where_all_failed() -> None:
    report = summarize([answered(error="timeout", detail="no byte")], 2.0)
    assert report.succeeded == 0
    assert report.output_tokens_per_s == 0
    assert report.ttft_s is None and report.itl_s is None and report.tpot_s is None


def example_report() -> BenchReport:
    return BenchReport(
        url="http://127.0.0.1:8000",
        model="[tiny]",
        seed=3,
        clients=2,
        max_tokens=5,
        rate=1.0,
        workloads={
            "solo": summarize([answered()], 4.0),
            "batch": summarize([answered(error="HTTP 500", detail="a [bold] fault")], 4.0),
        },
    )


def test_json_schema() -> None:
    written = json.loads(example_report().to_json())
    assert list(written) == [
        "url",
        "model",
        "seed",
        "clients",
        "max_tokens",
        "rate",
        "workloads",
        "schema",
    ]
    assert written["schema"] == 1
    solo = written["workloads"]["solo"]
    assert solo["itl_s"] == {"p50": 1.25, "p95": pytest.approx(1.925), "max": 2.0, "count": 2}
    assert solo["details"][0]["ttft_s"] == 1.0
    assert written["workloads"]["batch"]["ttft_s"] is None
    assert set(solo) == {
        "requests",
        "succeeded",
        "errors",
        "wall_s",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "output_tokens_per_s",
        "chunks",
        "ttft_s",
        "itl_s",
        "tpot_s",
        "e2e_s",
        "finish_reasons",
        "notes",
        "details",
    }


def test_ok_only_without_errors() -> None:
    report = example_report()
    assert not report.ok
    del report.workloads["batch"]
    assert report.ok


def test_table() -> None:
    out = io.StringIO()
    print_report(example_report(), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert "[tiny]" in lines[0]  # names are text, not markup
    cells = {line.split("│")[1].strip(): line.split("│")[2:4] for line in lines if line.count("│") == 4}
    assert [cell.strip() for cell in cells["failed"]] == ["0", "1"]
    assert [cell.strip() for cell in cells["TTFT p50, s"]] == ["1.000", "–"]
    assert [cell.strip() for cell in cells["longest stall"]] == ["2.000", "–"]
    assert lines[-1] == "batch: HTTP 500: a [bold] fault"
