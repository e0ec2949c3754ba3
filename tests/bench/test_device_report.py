"""What runs on a device came to, from what they wrote."""

from __future__ import annotations

from typing import Any

from tests.bench.scripts import script

device_report = script("device_report")
MACHINE = {"device": "A card", "versions": "mlx 1", "revision": "abc"}


def test_device_section() -> None:
    run = {
        "machine": MACHINE,
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
    text = device_report.section(run)
    assert "`python bench/device.py --batches 2`" in text
    assert "| m | 2 | bare | 1,000 | 1.00 | – | – | 2.00 |" in text
    assert "| m | 2 | ours (flat) | 930 | 0.93 | 800 | 0.80 | 2.16 |" in text
    assert "| m | 4 | ours | – | – | – | – | – |" in text
    assert "| m | two | ours (cut) | 3.00 | 11.00 | 1.10 | 12.0 |" in text
    assert "- m 4 ours: out of memory" in text


def test_http_section() -> None:
    def part(server: str, kind: str, **more: Any) -> dict[str, Any]:
        return {"model": "m", "server": server, "part": kind, **more}

    run = {
        "machine": MACHINE,
        "arguments": "--streams 8",
        "parts": [
            part("bare", "bare", streams=8, tok_s=1000.0),
            part("chairlift", "start", ready_s=2.0),
            part(
                *("chairlift", "streams"),
                streams=8,
                tok_s=500.0,
                steady_tok_s=800.0,
                requests=8,
                failed=0,
                ttft_p50=0.25,
                ttft_max=1.5,
            ),
            part("mlx_lm", "joins", streams=8, failed=8, why="HTTP 500"),
            part("chairlift", "turns", tokens=32000, cold_s=2.0, ram_s=0.5, disk_s=1.0),
        ],
    }
    text = device_report.section(run)
    assert "A card, mlx 1; chairlift abc. `python bench/device_http.py --streams 8`" in text
    assert "| m | streams, 8 | chairlift | 500 | 800 | 0.80 | 0.25 / 1.50 | 8 | 0 |" in text
    assert "| m | joins, 8 | mlx_lm | – | – | – | – | 0 | 8 |" in text
    assert "| m, 32,000 tokens | 2.00 | 0.500 (25.0%) | 1.000 (50.0%) |" in text
    assert "- m, mlx_lm, joins: HTTP 500" in text
