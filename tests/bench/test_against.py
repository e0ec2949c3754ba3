"""bench/against.py: what it says of servers that answer, and of those that do not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.server.bench.client import Measured
from chairlift.server.bench.options import BenchOptions, Workload
from chairlift.server.bench.report import WorkloadReport, summarize
from tests.bench.scripts import script

against, report, environments, peers = map(script, ("against", "against_report", "environments", "peers"))


def measured(kind: str, ttft: float, text: str = "a b", error: str | None = None) -> Measured:
    """An answer of two tokens, half a second apart."""
    return Measured(
        kind=kind,
        max_tokens=2,
        started=0.0,
        finished=ttft + 0.5,
        chunk_times=[ttft, ttft + 0.5],
        text=text,
        finish_reason="length",
        prompt_tokens=9,
        completion_tokens=2,
        error=error,
        detail="busy" if error else "",
    )


def workload(seconds: float, ttft: float, **changes: Any) -> WorkloadReport:
    """A short and a long request, 4 tokens in `seconds`; the long one's TTFT is 9 seconds."""
    return summarize([measured("short", ttft, **changes), measured("long", 9.0)], seconds)


def standing(name: str, **changes: Any) -> Any:
    peer = next(each for each in peers.PEERS if each.name == name)
    return report.Standing(peer, **{"versions": f"{name} 1.0", "ready_s": [2.0], **changes})


def test_sizes_name_a_workload_and_its_requests() -> None:
    assert list(against.sizes(["turns=4", "batch=12"]).items()) == [
        (Workload.BATCH, 12),
        (Workload.TURNS, 4),
    ]
    for wrong in ("batch", "batch=", "batch=0", "batch=-1", "batch=1.5", "all=3", "other=3", "batch=²"):
        with pytest.raises(against.CompareError, match="such as batch=12"):
            against.sizes([wrong])


def test_default_sizes_are_whole_rounds_of_every_client() -> None:
    arguments = against.parse([])
    for name, count in against.sizes(arguments.requests).items():
        options = BenchOptions(url="http://127.0.0.1:1", clients=arguments.clients, requests=count)
        assert options.count(name) == count
        if name in (Workload.BATCH, Workload.TURNS):
            assert count % arguments.clients == 0


def test_the_best_other_is_one_on_mlx_that_answered_everything() -> None:
    standings = [
        standing("chairlift", workloads={"mixed": workload(1.0, 0.25)}),
        standing("mlx_lm.server", workloads={"mixed": workload(4.0, 2.0)}),
        standing("vllm-mlx", workloads={"mixed": workload(2.0, 4.0)}),
        standing("rapid-mlx", workloads={"mixed": workload(0.1, 0.1, error="HTTP 503")}),
        standing("mlx_vlm.server", failed="does not install: no wheel"),
        standing("llama-cpp-python", workloads={"mixed": workload(0.1, 0.1)}),
    ]
    lines = [report.against_best(figure, standings) for figure in report.FIGURES]
    assert [line for line in lines if line] == [
        ["mixed, tok/s", "4", "vllm-mlx 2", "2.00", "≥ 1.3"],
        ["mixed, TTFT p95 of short prompts", "0.25", "mlx_lm.server 2", "0.12", "≤ 0.3"],
    ]
    assert not any(report.against_best(figure, standings[:1]) for figure in report.FIGURES)


def test_section_lists_what_was_not_measured(tmp_path: Path) -> None:
    arguments = against.parse(["--requests", "mixed=2", "--model", str(tmp_path / "tiny")])
    standings = [
        standing("chairlift", workloads={"mixed": workload(1.0, 0.25)}, peak_memory_bytes=3 * 10**9),
        standing("mlx_lm.server", workloads={"mixed": workload(4.0, 2.0, text="c")}),
        standing("vllm-mlx", reasons={"mixed": "it does not answer"}),
        standing("rapid-mlx", failed="does not install: no wheel", versions="", ready_s=[]),
        standing("llama-cpp-python", workloads={"mixed": workload(0.5, 0.1)}),
    ]
    text = report.section(standings, arguments, 120.0)
    lines = text.splitlines()
    assert str(tmp_path) not in text and "Model: tiny, the same folder" in text
    assert lines[0] == ("## Servers in turn: chairlift, mlx_lm.server, vllm-mlx, rapid-mlx, llama-cpp-python")
    assert (
        "`python bench/against.py --requests mixed=2 --clients 6 --max-tokens 24 --rate 1 --seed 0`" in lines
    )
    assert "The run took 2 minutes." in text
    assert "The run was ended after 2 minutes." in report.section(standings, arguments, 120.0, cut=True)
    ttft = "4.62 / 8.56 / 9"  # linear between 0.25 and 9
    assert f"| mixed | chairlift | 4.0 | {ttft} | 0.5 / 0.5 / 0.5 | 2 | 0 | 4 | – |" in lines
    mlx_lm = next(line for line in lines if line.startswith("| mixed | mlx_lm.server | 1.0 "))
    assert mlx_lm.endswith("| 2 | 0 | 4 | 1 of 2 |")
    assert "| mixed | vllm-mlx | none: it does not answer | – | – | – | – | – | – |" in lines
    assert "| mixed | rapid-mlx | none: does not install: no wheel | – | – | – | – | – | – |" in lines
    assert any(line.startswith("| mixed | llama-cpp-python (4-bit GGUF) | 8.0 ") for line in lines)
    assert "llama.cpp is another engine" in text
    assert "| short | mlx_lm.server | 1 | 2 / 2 / 2 | 0.5 / 0.5 / 0.5 | 2.5 / 2.5 / 2.5 |" in lines
    assert "| chairlift | 2 / 2 / 2 | 3.00 |" in lines and "| rapid-mlx | – | – |" in lines
    assert "- rapid-mlx: does not install: no wheel" in lines
    assert "- vllm-mlx, mixed: it does not answer" in lines


def test_a_shown_command_asks_for_the_same() -> None:
    given = ["--peers", "mlx_lm.server", "--requests", "batch=6", "--clients", "3", "--rate", "0.5"]
    arguments = against.parse(given)
    assert against.parse(report.shown_arguments(arguments)) == arguments


def test_a_server_that_does_not_start_is_tried_once() -> None:
    broken = peers.Peer("broken", "chairlift", ("-c", "raise SystemExit('no device')"), "/")
    each = report.Standing(broken, python=Path(sys.executable), model=Path("model"))
    against.measure(each, BenchOptions(url="http://127.0.0.1:1", workload=Workload.SOLO), 20.0)
    assert each.failed == "broken ended with code 1: no device"
    assert each.why_not("solo") == each.why_not("batch") == each.failed and not each.workloads


def test_a_server_is_ready_and_then_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from http.server import *; *_, host, _, port, more = sys.argv; assert more == 'more'; "
        "HTTPServer((host, int(port)), SimpleHTTPRequestHandler).serve_forever()"
    )
    peer = peers.Peer("plain", "chairlift", ("-c", code), "/")
    with peers.serving(peer, tmp_path, more=["more"]) as served:
        assert httpx.get(served.url).status_code == 200
        assert served.process.poll() is None and served.ready_s > 0
    assert served.process.poll() == -signal.SIGTERM


def test_a_peer_in_this_environment_needs_no_other(tmp_path: Path) -> None:
    python = environments.install(peers.CHAIRLIFT, tmp_path)
    assert python == Path(sys.executable) and not list(tmp_path.iterdir())
    assert environments.versions(peers.CHAIRLIFT, python).startswith("chairlift ")


def test_an_environment_is_made_once_for_its_requirements(tmp_path: Path) -> None:
    folder = tmp_path / peers.MLX_VLM.name
    folder.mkdir()
    (folder / "requirements.txt").write_text("\n".join(environments.requirements(peers.MLX_VLM)) + "\n")
    assert environments.install(peers.MLX_VLM, tmp_path) == folder / "bin" / "python"


def test_a_server_is_told_its_model_and_where_to_listen() -> None:
    for peer in peers.PEERS:
        arguments = peer.arguments(Path("folder"), 8123)
        assert arguments.count("folder") == 1 and peers.MODEL not in arguments
        assert arguments[-4:] == ["--host", "127.0.0.1", "--port", "8123"]


def test_a_server_of_this_tree_finds_it_from_an_empty_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}{tmp_path}")
    variables = peers.environment(tmp_path)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(Path("src").absolute()), str(tmp_path)]
    assert variables["HOME"] == str(tmp_path)


def test_what_pip_complains_of() -> None:
    said = (
        "WARNING: skipped\n  ERROR: Failed to build wheel\nERROR: No matching distribution for x\n\nnotice\n"
    )
    assert environments.complaint(said) == "No matching distribution for x"
    assert environments.complaint("Segmentation fault\n") == "Segmentation fault"
    assert environments.complaint("") == "pip said nothing"
